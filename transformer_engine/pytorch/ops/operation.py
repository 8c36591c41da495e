"""`FusibleOperation`, the base of operations, and `Sequential`, the container that runs them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import nn

from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor


class FusibleOperation(nn.Module):
    """Base of operations: modules with one input and one result.

    Some operations take extra inputs, or return extra outputs beside the result; `Sequential`
    passes these on.

    Attributes:
        num_extra_inputs: how many tensors `forward` takes beside the input.
        num_extra_outputs: how many tensors `forward` returns beside the result; if there are any,
            it returns a tuple.
        takes_quantized: the input may be a `QuantizedTensor`.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    takes_quantized: ClassVar[bool] = False


class Sequential(nn.Sequential):
    """Runs operations, or any modules, one after another; otherwise like `torch.nn.Sequential`.

    Operations are not fused: each runs separate kernels. For the usual sequences, `LayerNormMLP`
    and `LayerNormLinear` are faster: their norms and activations prepare the casts to FP8.

    Args:
        modules: operations or other modules, or one dict of them by name.

    >>> import torch
    >>> from transformer_engine.pytorch.ops import AddExtraInput, ConstantScale, MakeExtraOutput
    >>> keep = Sequential(MakeExtraOutput(), ConstantScale(2.0))
    >>> add = Sequential(ConstantScale(10.0), AddExtraInput())
    >>> add(*keep(torch.ones(2)))
    tensor([21., 21.])
    """

    def __init__(self, *modules: Any) -> None:
        named = len(modules) == 1 and isinstance(modules[0], dict)
        super().__init__(*([OrderedDict(modules[0])] if named else modules))

    @property
    def num_extra_inputs(self) -> int:
        """How many extra inputs all operations take together."""
        return sum([getattr(module, "num_extra_inputs", 0) for module in self])

    @property
    def num_extra_outputs(self) -> int:
        """How many extra outputs all operations return together."""
        return sum([getattr(module, "num_extra_outputs", 0) for module in self])

    @property
    def takes_quantized(self) -> bool:
        """Whether the input may be a `QuantizedTensor`: always."""
        return True

    def forward(self, x: torch.Tensor, *extra_inputs: Any) -> Any:
        """Run the operations in order; dequantise inputs for operations that need plain tensors.

        Args:
            x: the input of the first operation.
            extra_inputs: the extra inputs of all operations, in order.

        Returns:
            The result of the last operation; with extra outputs `(result, *extra_outputs)`, in
            the order of the operations.

        Raises:
            ValueError: too few or too many extra inputs.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise ValueError(
                f"[Sequential] expected {self.num_extra_inputs} extra inputs, got "
                f"{len(extra_inputs)}: {self._wishes()}"
            )
        extra_outputs: list[torch.Tensor] = []
        for module in self:
            count = getattr(module, "num_extra_inputs", 0)
            own, extra_inputs = extra_inputs[:count], extra_inputs[count:]
            if isinstance(x, QuantizedTensor) and not getattr(module, "takes_quantized", False):
                x = x.dequantize()
            x = module(x, *own)
            if getattr(module, "num_extra_outputs", 0):
                x, *made = x
                extra_outputs += made
        return (x, *extra_outputs) if extra_outputs else x

    def _wishes(self) -> str:
        """Which operations take how many extra inputs, for messages."""
        counts = [
            f"{name} ({type(module).__name__}) takes {module.num_extra_inputs}"
            for name, module in self.named_children()
            if getattr(module, "num_extra_inputs", 0)
        ]
        return ", ".join(counts) or "no operation takes any"
