"""Scenarios that every rank of distributed/test_amax_reduction runs."""

import torch
import torch.distributed as dist
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD


def _scales(rank: int, recipe: DelayedScaling, group: dist.ProcessGroup) -> tuple[float, float]:
    """Returns the scales of input and gradient after one step; amaxes differ between the ranks."""
    layer = te.Linear(16, 16, device=here(), init_method=torch.nn.init.ones_)
    x = torch.zeros(16, 16, device=here())
    x[0, 0] = float(rank + 1)
    with te.fp8_autocast(fp8_recipe=recipe, fp8_group=group):
        y = layer(x)
    y.backward(torch.full_like(y, float(2 - rank)))
    return layer.scaling[FORWARD].scale[0].item(), layer.scaling[BACKWARD].scale[0].item()


def scales_of_a_group(rank: int) -> list[tuple[float, float]]:
    """Returns the scales with amaxes reduced over the group, and with amaxes of this rank alone."""
    group = dist.new_group([0, 1])
    recipes = [DelayedScaling(amax_history_len=4, reduce_amax=reduce) for reduce in (True, False)]
    return [_scales(rank, recipe, group) for recipe in recipes]
