"""What needs the memory of a tensor's values, and is refused by tensors that have none."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch._torch_private import refuse_data_ptr


class WithoutStorage(torch.Tensor):
    """Base of wrappers around other tensors.

    `untyped_storage()` stays torch's, whose compiler tells tensors apart by it.
    """

    # Native code must unpack the payload: this keeps it from seeing an empty tensor.
    __dlpack_c_exchange_api__ = None

    @classmethod
    def wrap(cls, shape: torch.Size, dtype: torch.dtype, data: torch.Tensor) -> Any:
        """An instance with a nominal dtype, on the device of `data`."""
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=data.device, requires_grad=False
        )
        refuse_data_ptr(wrapper)
        return wrapper

    @property
    def label(self) -> str:
        """What the tensor is, for messages."""
        raise NotImplementedError

    def _refuse(self, what: str) -> Any:
        raise TypeError(
            f"[{type(self).__name__}] {what} needs a plain tensor with storage, got {self.label}, "
            "which holds FP8 codes: use its dequantize()"
        )

    def tolist(self) -> Any:
        """The values, which torch gives of plain tensors alone."""
        return self.dequantize().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else super().__format__(spec)

    def numpy(self, *, force: bool = False) -> Any:
        """NumPy has no such dtype: an error that names the tensor."""
        return self._refuse("numpy()")

    def storage(self) -> Any:
        """There is none, and safetensors asks for it: an error that names the tensor."""
        return self._refuse("storage()")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._refuse("DLPack")

    def share_memory_(self) -> Any:
        """Codes are not moved into shared memory: an error that names the tensor."""
        return self._refuse("share_memory_()")
