"""The two classes of FP8 weights, for tests that run on both."""

import torch

from transformer_engine.common.recipe import Float8BlockScaling, Recipe
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor

# The recipe to pass to `quantized_model_init`; None stands for any recipe with one scale per
# tensor.
KINDS: dict[type[QuantizedTensor], Recipe | None] = {
    Float8Tensor: None,
    Float8BlockwiseQTensor: Float8BlockScaling(),
}
NAMES = ("one scale", "blocks")


def codes(x: torch.Tensor) -> torch.Tensor:
    """Returns the row-wise codes of a tensor of either class."""
    assert isinstance(x, QuantizedTensor) and x.parts[0] is not None
    return x.parts[0]


def scales(x: torch.Tensor) -> torch.Tensor:
    """Returns the scales that belong to `codes`."""
    assert isinstance(x, QuantizedTensor) and x.parts[1] is not None
    return x.parts[1]
