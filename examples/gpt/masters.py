"""Master weights: what an optimizer steps where a model keeps its weights in FP8 alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gpt.ranks import cut


def initial_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """What FP8 weights were before they were rounded, by name; they keep it no longer.

    Args:
        model: made under `te.fp8_model_init(preserve_high_precision_init_val=True)`; without that
            it has no FP8 weights.
    """
    found = {}
    for name, weight in model.named_parameters():
        if hasattr(weight, "get_high_precision_init_val"):
            found[name] = weight.get_high_precision_init_val()
            weight.clear_high_precision_init_val()
    return found


class MasterWeights:
    """fp32 copies of a model's FP8 weights.

    An update is often smaller than half a step of FP8, and would be rounded away: so updates add up
    in fp32, and every step the weights become the masters, rounded once. Forward and backward read
    one byte for a weight, and cast none.

    Args:
        model: with FP8 weights, or none; then there is nothing to do here.
        starts: what these start with, see `initial_values`.
    """

    def __init__(self, model: nn.Module, starts: Mapping[str, torch.Tensor]) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, weight in model.named_parameters():
            if name in starts:
                start = starts[name].to(weight.device, torch.float32)
                self._pairs[name] = (weight, nn.Parameter(cut(start, weight)))
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
            master.copy_(cut(state[name], master))
