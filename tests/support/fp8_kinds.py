"""The two kinds of tensors that are kept in FP8, for tests that hold for both."""

import torch

from transformer_engine.common.recipe import Float8BlockScaling, Recipe
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor

# By the recipe of `quantized_model_init`; None is that of the recipes with one scale.
KINDS: dict[type[QuantizedTensor], Recipe | None] = {
    Float8Tensor: None,
    Float8BlockwiseQTensor: Float8BlockScaling(),
}
NAMES = ("one scale", "blocks")


def codes(x: torch.Tensor) -> torch.Tensor:
    """Row-wise, of either kind."""
    assert isinstance(x, QuantizedTensor) and x.parts[0] is not None
    return x.parts[0]


def scales(x: torch.Tensor) -> torch.Tensor:
    """Those of `codes`."""
    assert isinstance(x, QuantizedTensor) and x.parts[1] is not None
    return x.parts[1]
