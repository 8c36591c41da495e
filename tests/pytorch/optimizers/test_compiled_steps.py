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


class Counting(FusedAdam):
    """Counts its steps, as a trainer's subclass may."""

    calls = 0

    def step(self, *arguments, **more):
        self.calls += 1
        return super().step(*arguments, **more)


def test_hooks_and_subclasses_are_called_once(device: str) -> None:
    torch._dynamo.reset()
    weight = nn.Parameter(torch.ones(4, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer, hooks = Counting([weight], lr=0.01), []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    torch.compile(lambda one: one.step(), backend="aot_eager")(optimizer)
    assert optimizer.calls == 1 and len(hooks) in (1, 2)  # torch wraps each class's step
    eager = len(hooks)
    hooks.clear()
    optimizer.step()
    assert len(hooks) == eager
