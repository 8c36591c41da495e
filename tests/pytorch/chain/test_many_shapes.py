"""Calls with many shapes: which of them are recorded."""

from collections.abc import Callable

import pytest
import torch
from recordings import recordings_made

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

MODULES = {
    "Linear": lambda: te.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16),
    "TransformerLayer": lambda: te.TransformerLayer(
        32, 64, 2, device="cpu", params_dtype=torch.bfloat16, hidden_dropout=0.0
    ),
}
Recorded = Callable[..., list[bool]]


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    """Returns a function that calls a module with these lengths, and says which are recorded."""
    monkeypatch.setattr("transformer_engine.pytorch.chain.chain.Chain.most_shapes", 3)
    made = recordings_made(monkeypatch)

    def call(module: Callable[..., torch.Tensor], *lengths: int, train: bool = False) -> list[bool]:
        found = []
        for tokens in lengths:
            before, x = len(made), torch.ones(tokens, 1, 32, dtype=torch.bfloat16)
            with torch.set_grad_enabled(train), te.autocast(recipe=DelayedScaling()):
                y = module(x.requires_grad_(train))
            assert y.shape == (tokens, 1, 32)
            if train:
                y.sum().backward()
            found.append(len(made) > before)
        return found

    return call


@pytest.mark.parametrize("name", MODULES)
def test_in_inference_a_shape_that_is_often_called_replaces_the_oldest_one(recorded, name):
    """Prompts of many lengths leave room for the steps after them."""
    module = MODULES[name]()
    assert recorded(module, 16, 32, 48) == [True] * 3
    assert recorded(module, *range(64, 320, 16)) == [False] * 16
    assert recorded(module, *[320] * 12) == [False] * 7 + [True] + [False] * 4
    assert recorded(module, 32, 48, 320, 16) == [False] * 4


def test_in_training_the_first_shapes_of_a_module_stay(recorded):
    """A recompute expects that its call saves the same tensors as the first forward."""
    module = MODULES["Linear"]()
    assert recorded(module, 16, 32, 48, *[64] * 12, train=True) == [True] * 3 + [False] * 12


def test_training_of_layers_with_many_lengths(recorded):
    module = MODULES["TransformerLayer"]()
    assert recorded(module, *range(16, 320, 16), train=True) == [True] * 3 + [False] * 16
    for _ in range(6):
        assert not any(recorded(module, *range(64, 320, 16), train=True))
    assert sum(recorded(module, *range(64, 320, 16), train=True)) == 16


@pytest.mark.filterwarnings("ignore:.*use_reentrant parameter")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("wrap", [te.checkpoint, torch.utils.checkpoint.checkpoint])
def test_a_recompute_saves_what_the_first_forward_does(recorded, wrap, reentrant):
    """Also if a shape is recorded between both."""
    layer = MODULES["TransformerLayer"]()
    recorded(lambda x: wrap(layer, x, use_reentrant=reentrant), 16, 32, 48, *[64] * 12, train=True)


def test_checkpoints_of_two_kinds(recorded):
    """Each kind has its own table for recomputes, as each has one for first forwards."""
    module = MODULES["Linear"]()
    recorded(lambda x: te.checkpoint(module, x), 16, 32, 48, train=True)
    again = torch.utils.checkpoint.checkpoint
    recorded(lambda x: again(module, x, use_reentrant=False), *[64] * 3, train=True)


def test_results_do_not_depend_on_recordings(recorded):
    torch.manual_seed(0)
    x = torch.randn(16, 1, 32, dtype=torch.bfloat16)
    module = MODULES["TransformerLayer"]().eval()
    with torch.no_grad():
        first = module(x)
        recorded(module, *range(32, 320, 16))
        recorded(module, *[320] * 8, *[336] * 8, *[352] * 8)
        assert torch.equal(module(x), first)


def test_after_a_few_lengths_a_layer_records_those_that_come_again(recorded, monkeypatch):
    """A recording takes longer than a call, and many lengths come only once."""
    monkeypatch.setattr("transformer_engine.pytorch.chain.chain.Chain.most_shapes", 32)
    module = MODULES["TransformerLayer"]()
    assert recorded(module, *range(16, 16 * 13, 16), train=True) == [True] * 8 + [False] * 4
    assert recorded(module, 144, 144, 160, 16, train=True) == [True, False, True, False]
