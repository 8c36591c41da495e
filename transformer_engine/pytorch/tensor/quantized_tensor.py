"""`QuantizedTensor`: a tensor whose data is quantised, under a nominal high-precision dtype.

Any operation works: by default it runs on dequantised values and gives plain tensors; in-place
operations quantise their result again. What can be done on the codes alone (detach, clone, view,
moving between devices, copying) is listed by the subclass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

Handler = Callable[..., Any]


class QuantizedTensor(torch.Tensor):
    """Base of quantised tensors: a wrapper without storage of its own."""

    # Native code must unpack the payload: this keeps it from seeing an empty tensor.
    __dlpack_c_exchange_api__ = None
    handlers: ClassVar[dict[Any, Handler]] = {}

    @classmethod
    def wrap(cls, shape: torch.Size, dtype: torch.dtype, data: torch.Tensor) -> Any:
        """An instance with a nominal dtype, on the device of `data`."""
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=data.device, requires_grad=False
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (the nominal one where None)."""
        raise NotImplementedError

    def quantize_(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Replace the values, in place."""
        raise NotImplementedError

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle on the codes where listed, else dequantise, run, and quantise what was written."""
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        written = args[0] if args and func._schema.is_mutable else None
        if isinstance(written, QuantizedTensor):
            written.quantize_(plain_args[0])
            return written
        return result


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value
