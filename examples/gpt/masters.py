"""Master weights: what an optimizer steps where a model keeps its weights in FP8 alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class MasterWeights:
    """fp32 copies of a model's FP8 weights.

    An update is often smaller than half a step of FP8, and would be rounded away: so updates add up
    in fp32, and every step the weights become the masters, rounded once. Forward and backward read
    one byte for a weight, and cast none.

    Args:
        model: made under `te.fp8_model_init(preserve_high_precision_init_val=True)`; without that
            it has no FP8 weights, and there is nothing to do here.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, weight in model.named_parameters():
            if hasattr(weight, "get_high_precision_init_val"):
                start = weight.get_high_precision_init_val().to(weight.device, torch.float32)
                weight.clear_high_precision_init_val()
                self._pairs[name] = (weight, nn.Parameter(start))
        self.trained = [
            self._pairs[name][1] if name in self._pairs else parameter
            for name, parameter in model.named_parameters()
        ]

    def take_gradients(self) -> None:
        """Before a step: the gradients of the weights become those of their masters."""
        for weight, master in self._pairs.values():
            master.grad, weight.grad = weight.grad, None

    @torch.no_grad()
    def write_weights(self) -> None:
        """After a step: the weights become what the masters are now."""
        for weight, master in self._pairs.values():
            weight.copy_(master)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The masters by the names of their weights."""
        return {name: master.detach() for name, (_, master) in self._pairs.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with these masters; the model's own state holds the weights."""
        for name, (_, master) in self._pairs.items():
            master.copy_(state[name])
