"""Operations for branches, such as residual connections, in a `Sequential`.

`MakeExtraOutput` returns a tensor from the middle of a sequence, and `AddExtraInput` adds one.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.module.inputs import check_floating, check_tensors
from transformer_engine.pytorch.ops.operation import FusibleOperation
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor


class MakeExtraOutput(FusibleOperation):
    """Returns its input twice: for the next operation, and as an extra output of the sequence.

    The gradient of the input is the sum of both gradients. Both outputs are the same tensor, so an
    operation that writes one in place changes both.

    Args:
        in_place: has no effect; autograd adds gradients in place where nothing else reads them.

    >>> x, extra = MakeExtraOutput()(torch.tensor([1.0, 2.0]))
    >>> extra
    tensor([1., 2.])
    """

    num_extra_outputs = 1
    takes_quantized = True

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor itself, twice.

        Args:
            x: of any shape and dtype.

        Raises:
            TypeError: not a dense tensor.
        """
        check_tensors("MakeExtraOutput", x=x)
        return x, x


class AddExtraInput(FusibleOperation):
    """`y = x + extra`, where `extra` is an extra input of the sequence.

    Args:
        in_place: write the sum into the memory of `extra`, which then has the values of the result.
            This is an error in the backward if autograd has saved `extra` and needs the old values.

    >>> AddExtraInput()(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
    tensor([11., 22.])
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        """Add.

        Args:
            x: of any shape, fp32, fp16 or bf16.
            extra: of the shape of `x`.

        Returns:
            The shape and the dtype of `x`; with `in_place` the dtype of `extra`, and its memory.

        Raises:
            ValueError: another shape; `in_place` with an extra input that is quantized, or a leaf
                that requires a gradient.
            TypeError: arguments that are not dense tensors of floating point.
        """
        check_floating("AddExtraInput", x=x, extra=extra)
        if x.shape != extra.shape:
            raise ValueError(
                f"[AddExtraInput] expected extra of shape {tuple(x.shape)}, as x, got "
                f"{tuple(extra.shape)}"
            )
        if not self.in_place:
            return x + extra.to(x.dtype)
        leaf = extra.is_leaf and extra.requires_grad and torch.is_grad_enabled()
        if leaf or isinstance(extra, QuantizedTensor):
            kind = "a leaf that requires grad" if leaf else type(extra).__name__
            raise ValueError(
                f"[AddExtraInput] expected extra that can be written with in_place=True, got {kind}"
            )
        return extra.add_(x)

    def extra_repr(self) -> str:
        """The setting."""
        return f"in_place={self.in_place}"
