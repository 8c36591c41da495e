"""Operations that are one call of torch: `Identity`, `Reshape`, `ConstantScale`, `Dropout`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from transformer_engine.pytorch.module.arguments import check_numbers
from transformer_engine.pytorch.module.inputs import check_floating, check_tensors
from transformer_engine.pytorch.ops.operation import FusibleOperation


class Identity(FusibleOperation):
    """`y = x`.

    >>> Identity()(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    takes_quantized = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself.

        Args:
            x: of any shape and dtype.
        """
        return x


class Reshape(FusibleOperation):
    """`y = x.reshape(shape)`; gradients have the shape of `x`.

    Args:
        shape: shape of the result; one size may be -1, which is inferred.

    Raises:
        TypeError: sizes that are not ints.

    >>> Reshape((-1, 2))(torch.arange(4.0))
    tensor([[0., 1.],
            [2., 3.]])
    """

    takes_quantized = True

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        try:
            self.shape = tuple(shape)
        except TypeError as error:
            raise TypeError(f"[Reshape] expected shape to be ints, got {shape!r}") from error
        if not all(isinstance(size, int) for size in self.shape):
            raise TypeError(f"[Reshape] expected shape to be ints, got {self.shape}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape.

        Args:
            x: of any dtype, with as many elements as the result.

        Raises:
            ValueError: another number of elements.
            TypeError: not a dense tensor.
        """
        check_tensors(type(self).__name__, x=x)
        try:
            return x.reshape(self.shape)
        except RuntimeError as error:
            raise ValueError(
                f"[Reshape] expected x that has the shape {self.shape} in another order of sizes, "
                f"got {tuple(x.shape)}"
            ) from error

    def extra_repr(self) -> str:
        """The shape."""
        return str(self.shape)


class ConstantScale(FusibleOperation):
    """`y = scale * x`, in the dtype of `x`.

    Args:
        scale: a number.

    Raises:
        TypeError: not a number.

    >>> ConstantScale(0.5)(torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.0000])
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        check_numbers("ConstantScale", None, scale=scale)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Args:
            x: of any shape, fp32, fp16 or bf16.

        Raises:
            TypeError: not a dense tensor of floating point.
        """
        check_floating(type(self).__name__, x=x)
        return x * self.scale

    def extra_repr(self) -> str:
        """The number."""
        return str(self.scale)


class Dropout(FusibleOperation):
    """Zeros elements with probability `p` and divides the others by `1 - p`; `x` in evaluation.

    Args:
        p: probability of dropping an element, `0 <= p < 1`.

    Raises:
        TypeError: `p` is not a number.
        ValueError: `p` is out of range.

    >>> Dropout(0.1).eval()(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        check_numbers("Dropout", None, p=p)
        if not 0 <= p < 1:
            raise ValueError(f"[Dropout] expected 0 <= p < 1, got {p}")
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements while training; the mask is drawn from torch's generator of the device.

        Args:
            x: of any shape, fp32, fp16 or bf16.

        Raises:
            TypeError: not a dense tensor of floating point.
        """
        check_floating(type(self).__name__, x=x)
        return torch.nn.functional.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"
