"""fp32 master weights, which the optimizer updates if a model keeps its weights only in FP8."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gpt.ranks import cut


def initial_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns by name the initial values of FP8 weights before rounding; the weights drop them.

    Args:
        model: a model that was made under
            `te.fp8_model_init(preserve_high_precision_init_val=True)`. A model without FP8 weights
            gives {}.
    """
    found = {}
    for name, weight in model.named_parameters():
        if hasattr(weight, "get_high_precision_init_val"):
            found[name] = weight.get_high_precision_init_val()
            weight.clear_high_precision_init_val()
    return found


class MasterWeights:
    """fp32 copies of a model's FP8 weights.

    An update is often smaller than half the distance between two FP8 values, and would be lost by
    rounding. So updates accumulate in fp32 masters, and after every step the masters are rounded to
    the FP8 weights. Forward and backward read one byte per weight, and need no cast.

    Args:
        model: the model; if it has no FP8 weights, the methods do nothing.
        starts: initial values of the masters, see `initial_values`.
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
        """Call before the optimizer's step: moves the gradients of the weights to the masters."""
        for weight, master in self._pairs.values():
            master.grad, weight.grad = weight.grad, None

    @torch.no_grad()
    def write_weights(self) -> None:
        """Call after the optimizer's step: casts the masters into the FP8 weights."""
        for weight, master in self._pairs.values():
            weight.copy_(master)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The masters, by the names of the weights."""
        return {name: master.detach() for name, (_, master) in self._pairs.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the masters of a checkpoint; the weights are in the state of the model."""
        for name, (_, master) in self._pairs.items():
            master.copy_(cut(state[name], master))
