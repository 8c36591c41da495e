"""Inputs and gradients that a functional collective may still write (`AsyncCollectiveTensor`)."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from rulers import assert_bitwise
from torch import nn
from torch.distributed import _functional_collectives as functional

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
    "checkpoint": lambda: te.LayerNormMLP(32, 32, device="cpu", checkpoint=True),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "GELU": te.ops.GELU,
    "TransformerLayer": lambda: te.TransformerLayer(
        32, 32, 2, device="cpu", hidden_dropout=0.0, attention_dropout=0.0
    ),
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer names are not in torch 2.11
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_modules_wait(kind: str, enabled: bool) -> None:
    module, group = MODULES[kind](), dist.group.WORLD
    for read_before in (False, False, True):
        x = torch.randn(16, 2, 32, requires_grad=True)
        unfinished = functional.all_gather_tensor_autograd(x * 1.0, 0, group)
        assert type(unfinished) is functional.AsyncCollectiveTensor
        if read_before:
            assert unfinished.sum() == x.sum()
        grad = functional.all_reduce(torch.randn(16, 2, 32), "sum", group)
        assert type(grad) is functional.AsyncCollectiveTensor
        found = []
        for value in (unfinished, x):
            with te.fp8_autocast(enabled=enabled, fp8_recipe=Float8CurrentScaling()):
                y = module(value)
            found.append((y, *torch.autograd.grad(y, x, grad)))
        for one, other in zip(*found, strict=True):
            assert type(one) is torch.Tensor
            assert_bitwise(one.detach(), other.detach())
