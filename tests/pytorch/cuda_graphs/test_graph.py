"""Whole training steps in a CUDA graph."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from debug_session import debugging, logged, section
from graph_helpers import RECIPES, STEPS, batch, captured, everything, layer
from precisions import scope
from rulers import assert_equal
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def training_step(model: nn.Module, recipe: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with scope(recipe):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recomputes", [None, True, False])
def test_ten_replays_of_a_training_step(recipe: str, recomputes: bool | None) -> None:
    class Model(nn.Sequential):
        def forward(self, x):
            for part in self:
                x = (
                    part(x)
                    if recomputes is None
                    else te.checkpoint(part, x, use_reentrant=recomputes, preserve_rng_state=False)
                )
            return x

    eager = Model(*(layer(i) for i in range(2)))
    graphed = copy.deepcopy(eager)
    inputs = [batch() for _ in range(STEPS)]
    x, first = batch().requires_grad_(), batch()

    def run(step, repeat) -> list[torch.Tensor]:
        losses = []
        for inp in inputs:
            with torch.no_grad():
                x.copy_(inp)
            losses.append(repeat(step).clone())
        return losses

    with torch.no_grad():
        x.copy_(first)
    step = training_step(eager, recipe, x)
    for _ in range(3):
        step()
    expected = run(step, lambda step: step())
    with torch.no_grad():
        x.copy_(first)
    graph, out = captured(training_step(graphed, recipe, x))

    def replay(_):
        graph.replay()
        return out

    assert_equal(run(None, replay), expected)
    assert_equal(everything(graphed), everything(eager))


@pytest.mark.gpu
def test_statistics_of_replayed_training_steps(tmp_path: Path) -> None:
    kinds = ["activation", "gradient", "weight", "output", "wgrad", "dgrad"]
    sections = (
        section("LogTensorStats", tensors=kinds, stats=["mean", "std", "max", "l2_norm"], freq=2),
        section("LogFp8TensorStats", tensors=["activation", "gradient"], stats=["underflows%"]),
    )
    x, logs = batch(), []
    for graphed in (False, True):
        model = layer()
        step = training_step(model, "delayed", x)
        with debugging(tmp_path / str(graphed), *sections):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
                    debug_api.step()
            torch.cuda.synchronize()
            if graphed:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side):
                    step()
            for _ in range(4):
                graph.replay() if graphed else step()
                debug_api.step()
        logs.append(logged(tmp_path / str(graphed)))
    assert {i for i, _, _ in logs[0]} == set(range(7))
    assert logs[0] == logs[1]


@pytest.mark.gpu
def test_a_checkpoint_that_restores_random_numbers_is_refused_in_a_capture() -> None:
    module = te.Linear(16, 16)
    x = torch.randn(16, 16, device="cuda", requires_grad=True)
    module(x).sum().backward()
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="preserve_rng_state=False inside a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x * 2  # torch warns about empty graphs
        te.checkpoint(module, x)


@pytest.mark.gpu
def test_fp8_modules_that_are_new_in_a_capture_are_refused() -> None:
    module = te.Linear(16, 16)
    x = torch.randn(16, 16, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="inside a CUDA graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        te.fp8_autocast(),
    ):
        module(x)
