"""`TensorMaking`: the interface of public quantizers, which return quantised tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.tensor.transparent import Quantize


class TensorMaking:
    """Base of public quantizers: calling one returns a quantised tensor.

    Subclasses say in `_made` how a tensor is quantised.
    """

    rowwise_usage = True
    columnwise_usage = True

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose whether row-wise and column-wise (transposed) codes are made."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def get_usages(self) -> dict[str, bool]:
        """What `set_usage` chose."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def quantize(
        self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Quantise.

        Args:
            tensor: fp32, fp16 or bf16.
            out: a tensor to write into, instead of a new one.
            dtype: nominal dtype of a new tensor; None is that of `tensor`.

        Raises:
            TypeError: not a tensor, or one of another dtype.
            ValueError: a tensor without dimensions.
        """
        self._check(tensor)
        if out is not None:
            return out.quantize_(tensor)
        made = self._made(tensor.detach().contiguous().resolve_neg())
        if dtype not in (None, made.dtype):
            made = made.assembled(made.shape, made.parts, {**made.facts, "dtype": dtype})
        return made

    def multi_quantize(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """`quantize` of each."""
        return [self.quantize(tensor) for tensor in tensors]

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> Any:
        """The same as `dst.quantize_(src)`."""
        return dst.quantize_(src, noop_flag=noop_flag)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A quantised tensor of zeros, to write into.

        Args:
            shape: the shape.
            dtype: the nominal dtype.
            device: None is cuda where there is one, else cpu.
            requires_grad: autograd records operations on it.
            pin_memory: codes and scales are in pinned memory.
        """
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        made = self.quantize(torch.zeros(tuple(shape), dtype=dtype, device=where))
        if pin_memory:
            made = made.mapped(lambda part: part.pin_memory())
        return made.requires_grad_(requires_grad)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record what a later cast needs to know of such tensors, without casting this one."""
        self._check(tensor)
        self.record_amax(tensor.detach().contiguous())  # type: ignore[attr-defined]

    def is_quantizable(self, tensor: torch.Tensor) -> bool:
        """Whether parts of the tensor's tokens can be cast alone; with one scale always."""
        return True

    def copy(self) -> Any:
        """A copy whose usages can be set separately; it shares scale and amax with this one."""
        return copy.copy(self)

    def _check(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"[{type(self).__name__}] expected tensor to be a torch.Tensor, got"
                f" {type(tensor).__name__}"
            )
        if not tensor.ndim:
            raise ValueError(
                f"[{type(self).__name__}] expected a tensor of one dimension or more, got shape ()"
            )

    def _made(self, plain: torch.Tensor) -> Any:
        raise NotImplementedError

    def __call__(
        self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> Any:
        """`quantize`; to autograd it is the identity."""
        needs_grad = getattr(tensor, "requires_grad", False)
        if needs_grad and torch.is_grad_enabled() and out is None and dtype is None:
            return Quantize.apply(tensor, self)
        return self.quantize(tensor, out=out, dtype=dtype)


class FindsScales:
    """The settings of quantizers that find scales themselves, under their documented names."""

    power_of_2: bool
    epsilon: float

    @property
    def force_pow_2_scales(self) -> bool:
        """Whether scales are rounded down to powers of two."""
        return self.power_of_2

    @property
    def amax_epsilon(self) -> float:
        """The value to which smaller amaxes are raised."""
        return self.epsilon
