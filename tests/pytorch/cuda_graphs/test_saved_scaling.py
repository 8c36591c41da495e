"""Functions for trainers that capture graphs themselves: saving and restoring scaling state."""

import pytest
import torch
from graph_helpers import batch, captured, layer
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.cuda_graphs.saved_scaling import (
    is_graph_capturing,
    restore_fp8_tensors,
    save_fp8_tensors,
    set_capture_end,
    set_capture_start,
)

RECIPE = DelayedScaling(amax_history_len=4)


def run(model: nn.Module, x: torch.Tensor, recipe: DelayedScaling, steps: int) -> None:
    for i in range(steps):
        with te.fp8_autocast(fp8_recipe=recipe):
            y = model((i + 1.0) * x)
        y.sum().backward()


def state(model: nn.Module) -> list[torch.Tensor]:
    modules = [m for m in model.modules() if hasattr(m, "scaling")]
    states = [s for m in modules for _, s in sorted(m.scaling.items())]
    return [t.clone() for s in states for t in (s.scale, s.amax_history)]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(te.Linear(32, 32, device="cpu"), te.LayerNormMLP(32, 64, device="cpu"))


def test_scales_and_histories_come_back_in_place(model) -> None:
    x = torch.randn(16, 32)
    run(model, x, RECIPE, 3)
    before = state(model)
    rooms = [s.room.data_ptr() for m in model for s in m.scaling.values()]
    saved = save_fp8_tensors([model], RECIPE)
    run(model, 5.0 * x, RECIPE, 6)
    assert not all(map(torch.equal, before, state(model)))
    restore_fp8_tensors([model], saved)
    assert all(map(torch.equal, before, state(model)))
    assert rooms == [s.room.data_ptr() for m in model for s in m.scaling.values()]


def test_another_length_of_histories_keeps_the_newest(model) -> None:
    x = torch.randn(16, 32)
    run(model, x, RECIPE, 3)
    before = model[0].scaling["forward"].amax_history.clone()
    saved = save_fp8_tensors([model])
    run(model, x, DelayedScaling(amax_history_len=2), 1)
    now = model[0].scaling["forward"]
    address = now.room.data_ptr()
    restore_fp8_tensors([model], saved)
    assert torch.equal(now.amax_history, before[[0, 3]]) and now.room.data_ptr() == address


def test_state_that_was_made_since_starts_anew(model) -> None:
    saved = save_fp8_tensors([model], RECIPE)
    run(model, torch.randn(16, 32), RECIPE, 2)
    restore_fp8_tensors([model], saved)
    made = state(model)
    assert made and all((t == (1.0 if t.dim() == 1 else 0.0)).all() for t in made)


def test_recipes_without_state_and_other_modules(model) -> None:
    assert save_fp8_tensors([model], Float8CurrentScaling()) is None
    restore_fp8_tensors([model], None)
    with pytest.raises(ValueError, match="expected the 2 modules whose state was saved, got 1"):
        restore_fp8_tensors([model[0]], save_fp8_tensors([model]))


def test_a_trainer_announces_its_captures() -> None:
    assert not is_graph_capturing()
    set_capture_start()
    assert is_graph_capturing() and not is_capturing()
    set_capture_end()
    assert not is_graph_capturing()


@pytest.mark.gpu
def test_a_forward_that_a_trainer_captures() -> None:
    """Megatron-Core warms up, captures and restores; replays start from the saved scales."""
    own, other, x = layer(), layer(), batch()

    def forward(part: nn.Module) -> torch.Tensor:
        with torch.no_grad(), te.fp8_autocast(fp8_recipe=RECIPE):
            return part(x)

    for part in (own, other):
        run(part, x, RECIPE, 2)
    set_capture_start()
    saved = save_fp8_tensors([own], RECIPE)
    graph, out = captured(lambda: forward(own))
    restore_fp8_tensors([own], saved)
    set_capture_end()
    graph.replay()
    assert torch.equal(out, forward(other))


@pytest.mark.gpu
def test_weak_references_share_memory() -> None:
    x = torch.arange(12, device="cuda").view(3, 4).t()
    weak = te.utils.make_weak_ref({"x": [x, 1]})["x"]
    assert torch.equal(weak[0], x) and weak[1] == 1
    assert (weak[0].data_ptr(), weak[0].stride()) == (x.data_ptr(), x.stride())
