"""Scenarios that every rank of distributed/test_amax_reduction runs."""

import torch
import torch.distributed as dist
from custom_recipes import run
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
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


def quantizers_of_a_group(rank: int) -> dict[str, bool]:
    """Whether casts of the ranks' rows have the codes and the scale of a cast of all rows."""
    torch.manual_seed(0)
    whole = torch.randn(32, 32, device=here()) * torch.tensor([[1.0], [5.0]]).repeat_interleave(
        16, dim=0
    ).to(here())
    own = whole.chunk(2)[rank]
    kind = te.DType.kFloat8E4M3
    expected = te.Float8CurrentScalingQuantizer(kind, force_pow_2_scales=True)(whole)
    found = {}
    for name, group in (("group", dist.new_group([0, 1])), ("all ranks", None)):
        quantizer = te.Float8CurrentScalingQuantizer(
            kind, with_amax_reduction=True, amax_reduction_group=group, force_pow_2_scales=True
        )
        made = quantizer.copy()(own)
        scales = torch.equal(made._scale_inv, expected._scale_inv)
        found[name] = scales and torch.equal(made._data, expected._data.chunk(2)[rank])
        if rank == 0:  # without the other rank
            quantizer.make_empty(own.shape, device=here())
        made = quantizer.make_empty(own.shape, device=here())
        made.quantize_(torch.ones_like(own) * (rank + 1))  # writes are casts, too
        found[f"{name}, written"] = made._scale_inv[1].item() == 128.0
    one = te.Float8CurrentScalingQuantizer(
        kind,
        with_amax_reduction=True,
        amax_reduction_group=[dist.new_group([each]) for each in (0, 1)][rank],
        force_pow_2_scales=True,
    )
    alone = te.Float8CurrentScalingQuantizer(kind, force_pow_2_scales=True)(own)
    found["one rank"] = torch.equal(one(own)._scale_inv, alone._scale_inv)
    return found


def chosen_quantizers(rank: int) -> bool:
    """Whether ranks that choose the quantizers of a recipe get its results."""
    settings = {"tp_group": dist.new_group([0, 1]), "tp_size": 2, "set_parallel_mode": True}
    layer = te.LayerNormMLP(64, 128, sequence_parallel=True, device=here(), **settings)
    kinds = {"grad_output": te.DType.kFloat8E5M2}

    def choose(role: te.QuantizerRole) -> te.Float8CurrentScalingQuantizer:
        kind = kinds.get(role.tensor_type, te.DType.kFloat8E4M3)
        return te.Float8CurrentScalingQuantizer(kind)

    def call(x: torch.Tensor) -> torch.Tensor:
        return layer(x * (1 + rank))

    found = [run(layer, one, call, rank) for one in (CustomRecipe(choose), Float8CurrentScaling())]
    return all(torch.equal(own, wanted) for own, wanted in zip(*found, strict=True))
