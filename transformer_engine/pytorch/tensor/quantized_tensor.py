"""`QuantizedTensor`: a tensor whose data is quantised, under a nominal high-precision dtype.

Any operation works: by default it runs on dequantised values and gives plain tensors; what it
writes in place is quantised again. What can be done on the codes alone (detach, clone, view,
moving between devices, copying) is listed by the subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

Handler = Callable[..., Any]

# Operations on lists of tensors (optimizers have them) dequantise so much at a time.
_MOST_BYTES = 1 << 28


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

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The same kind of tensor, around what a function makes of the plain tensors inside."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """What the tensor is, for messages: its class, and the parameter of which layer."""
        return type(self).__name__

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
        if func.namespace == "c10d":  # would reach the values that are made for it alone
            _refuse_communication(func, args)
        if func._schema.returns:
            return _on_values(func, args, kwargs)
        for part, named in _parts(args, kwargs):
            _on_values(func, part, named)
        return None

    def _refuse(self, what: str) -> Any:
        raise TypeError(
            f"[{type(self).__name__}] {what} needs a plain tensor with storage, got {self.label}, "
            "which holds FP8 codes: use its dequantize()"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """NumPy has no such dtype: an error that names the tensor."""
        return self._refuse("numpy()")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._refuse("DLPack")

    def share_memory_(self) -> Any:
        """Codes are not moved into shared memory: an error that names the tensor."""
        return self._refuse("share_memory_()")


def to_copy(
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **layout: Any,  # codes stay contiguous whatever is asked
) -> Any:
    """`aten._to_copy` for subclasses: to another device as codes, to another dtype as values."""
    to = device or x.device
    if dtype not in (None, x.dtype):
        return x.dequantize(dtype=dtype).to(to, non_blocking=non_blocking)
    return x.mapped(lambda part: part.to(to, non_blocking=non_blocking, copy=True))


class TensorMaking:
    """What public quantizers have in common: calling one gives a quantised tensor."""

    rowwise_usage = True
    columnwise_usage = True

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose whether codes and transposed codes are made."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def quantize(self, tensor: torch.Tensor, *, out: Any = None) -> Any:
        """Quantise; into `out` where it is given."""
        raise NotImplementedError

    def __call__(self, tensor: torch.Tensor) -> Any:
        """`quantize`."""
        return self.quantize(tensor)


def _refuse_communication(func: Any, args: tuple[Any, ...]) -> None:
    for leaf in tree_leaves(args):
        if isinstance(leaf, QuantizedTensor):
            name = func._schema.name.removeprefix("c10d::")
            leaf._refuse(f"torch.distributed ({name})")


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on dequantised values, and quantise again what the operation has written."""
    plain: dict[int, torch.Tensor] = {}
    originals: dict[int, QuantizedTensor] = {}

    def values(leaf: Any) -> Any:
        if not isinstance(leaf, QuantizedTensor):
            return leaf
        if id(leaf) not in plain:
            plain[id(leaf)] = found = leaf.dequantize()
            originals[id(found)] = leaf
        return plain[id(leaf)]

    result = func(*tree_map(values, args), **tree_map(values, kwargs))
    for tensor in _written(func, args, kwargs):
        tensor.quantize_(plain[id(tensor)])
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[QuantizedTensor]:
    """The quantised tensors that an operation writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, QuantizedTensor):
                yield leaf


def _parts(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """An operation on lists of tensors, cut into operations on parts of these lists."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
    quantized = [a for a in lists if any(isinstance(t, QuantizedTensor) for t in a)]
    if not quantized:
        yield args, kwargs
        return
    count, start, size = len(quantized[0]), 0, 0
    for i, tensors in enumerate(zip(*quantized, strict=True)):
        size += sum(t.nbytes for t in tensors)
        if size < _MOST_BYTES and i + 1 < count:
            continue
        part = partial(_part, count, slice(start, i + 1))
        yield tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}
        start, size = i + 1, 0


def _part(count: int, where: slice, value: Any) -> Any:
    return value[where] if isinstance(value, list | tuple) and len(value) == count else value
