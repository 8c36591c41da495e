"""`WithoutStorage`: a tensor whose values are not in memory, and what it therefore refuses."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch._torch_private import refuse_data_ptr


class WithoutStorage(torch.Tensor):
    """Base of wrappers around other tensors.

    `untyped_storage()` is not refused, because torch.compile identifies tensors by it.
    """

    # Without this, native code that uses the C API of DLPack would see an empty tensor.
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
        """The dequantised values; torch's function supports plain tensors only."""
        return self.dequantize().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else super().__format__(spec)

    def numpy(self, *, force: bool = False) -> Any:
        """Raises TypeError with the tensor's name, because NumPy has no FP8 dtype."""
        return self._refuse("numpy()")

    def storage(self) -> Any:
        """Raises TypeError with the tensor's name. safetensors, for example, calls this."""
        return self._refuse("storage()")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._refuse("DLPack")

    def share_memory_(self) -> Any:
        """Raises TypeError with the tensor's name; codes are not moved into shared memory."""
        return self._refuse("share_memory_()")
