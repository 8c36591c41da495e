"""Amaxes are reduced over the ranks of `fp8_group`: two processes over gloo, on the CPU."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.scaling_state import BACKWARD, FORWARD


def _scales(rank: int, recipe: DelayedScaling, group: dist.ProcessGroup) -> tuple[float, float]:
    """Of input and gradient after one step with amaxes that differ between the ranks."""
    layer = te.Linear(16, 16, device="cpu", init_method=torch.nn.init.ones_)
    x = torch.zeros(16, 16)
    x[0, 0] = float(rank + 1)
    with te.fp8_autocast(fp8_recipe=recipe, fp8_group=group):
        y = layer(x)
    y.backward(torch.full_like(y, float(2 - rank)))
    return layer.scaling[FORWARD].scale[0].item(), layer.scaling[BACKWARD].scale[0].item()


def _rank(rank: int, store: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    recipes = [DelayedScaling(amax_history_len=4, reduce_amax=reduce) for reduce in (True, False)]
    torch.save([_scales(rank, recipe, group) for recipe in recipes], f"{results}.{rank}")
    dist.destroy_process_group()


def test_ranks_agree_on_scales(tmp_path) -> None:
    mp.spawn(_rank, (str(tmp_path / "store"), str(tmp_path / "result")), nprocs=2)
    reduced, own = zip(*(torch.load(tmp_path / f"result.{rank}") for rank in range(2)), strict=True)
    assert reduced == ((448.0 / 2, 57344.0 / 2),) * 2
    assert own == ((448.0, 57344.0 / 2), (448.0 / 2, 57344.0))
