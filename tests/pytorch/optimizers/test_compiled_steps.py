"""Steps of optimizers in compiled code."""

import copy

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

from transformer_engine.pytorch.optimizers import FusedAdam

SETTINGS = {
    "usual": {},
    "on the device": {"capturable": True},
    "masters": {"master_weights": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_fused_adam(settings: str, device: str) -> None:
    """Every parameter is stepped with its own state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if settings == "masters" else torch.float32
    shapes = [(6,), (6, 3), (3, 6, 2), (6,)]
    eager = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    twins = copy.deepcopy(eager)
    optimizers = [FusedAdam(own, lr=0.01, **SETTINGS[settings]) for own in (eager, twins)]
    compiled = torch.compile(lambda optimizer: optimizer.step(), backend="aot_eager")
    for step in range(4):
        for p, twin in zip(eager, twins, strict=True):
            p.grad = torch.randn_like(p) * (1 + step)
            twin.grad = p.grad.clone()
        optimizers[0].step()
        compiled(optimizers[1])
        for p, twin in zip(eager, twins, strict=True):
            assert_bitwise(twin.detach(), p.detach())


CALLS: list[str] = []


class Counting(FusedAdam):
    """Runs its own code in `step`, as subclasses of trainers may."""

    def step(self, *arguments, **more):
        CALLS.append("step")
        return super().step(*arguments, **more)


def test_hooks_and_subclasses_are_called_once(device: str) -> None:
    def run(optimizer):
        optimizer.step()

    weight = nn.Parameter(torch.ones(4, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer, found = Counting([weight], lr=0.01), []
    optimizer.register_step_post_hook(lambda *_: CALLS.append("hook"))
    torch._dynamo.reset()
    for step in (run, torch.compile(run, backend="aot_eager")):
        CALLS.clear()
        step(optimizer)
        found.append([*CALLS])
    assert found[0] == found[1] and found[0].count("step") == 1
