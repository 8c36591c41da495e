"""Compiled code that writes weights in FP8: operators of optimizers, and writes to slices."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from precisions import RECIPES, scope
from rulers import assert_bitwise

import transformer_engine.pytorch as te

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.11 traces no tensors in FP8"
)
WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "copy_": lambda w, x: w.copy_(x),
    "mul_": lambda w, x: w.mul_(x),
    "_foreach_add_": lambda w, x: torch._foreach_add_([w], [x], alpha=0.5),
    "rows": lambda w, x: w[8:24].copy_(x[8:24]),
    "assigned rows": lambda w, x: w.__setitem__(slice(8, 24), 100 * x[8:24]),
    "flat": lambda w, x: w.view(-1)[32:96].add_(1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with te.fp8_model_init():
        layer = te.Linear(32, 32, device=device)
    ours, x = layer.weight.detach(), torch.randn(32, 32, device=device)
    theirs = copy.deepcopy(ours)
    WRITES[name](theirs, x)
    torch.compile(WRITES[name], backend="aot_eager", fullgraph=True)(ours, x)
    assert_bitwise(ours.dequantize(), theirs.dequantize())


@pytest.mark.parametrize("name", ["mul_", "copy_"])
def test_slices_that_come_in_are_read_alone(name: str, device: str) -> None:
    torch._dynamo.reset()
    with te.fp8_model_init():
        weight = te.Linear(32, 32, device=device).weight.detach()
    before, x = weight.dequantize(), torch.full((16, 32), 100.0, device=device)
    write = torch.compile(WRITES[name], backend="aot_eager", fullgraph=True)
    write(weight[:16].clone(), x)  # this graph does not serve slices
    with pytest.raises(RuntimeError, match="slice as an input of compiled code"):
        write(weight[:16], x)
    assert_bitwise(weight.dequantize(), before)


@pytest.mark.parametrize("precision", [name for name in RECIPES if name != "high precision"])
def test_steps_of_an_optimizer(precision: str, device: str) -> None:
    """The next forward and backward read the weights that the step has written."""
    torch._dynamo.reset()
    found: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        with te.fp8_model_init(recipe=RECIPES[precision]):
            layer = te.LayerNormMLP(32, 64, device=device)
        optimizer = torch.optim.SGD(layer.parameters(), 0.01, momentum=0.9)
        step = optimizer.step
        step = torch.compile(step, backend="aot_eager") if compiled else step
        x = torch.randn(16, 32, device=device, requires_grad=True)
        found.append([])
        for _ in range(4):
            optimizer.zero_grad()
            with scope(precision):
                out = layer(x)
            out.square().sum().backward()
            step()
            found[-1] += [out.detach(), x.grad.clone()]
    for ours, theirs in zip(*found, strict=True):
        assert_bitwise(ours, theirs)
