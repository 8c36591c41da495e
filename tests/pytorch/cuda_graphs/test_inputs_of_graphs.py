"""Inputs of graphed callables and their gradients, with graphs that the CPU emulates."""

import pytest
import torch
from emulated_graphs import emulate, graphs, sample

import transformer_engine.pytorch as te


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


TO_INPUT = {  # rows of a leaf, and the function that makes an input from it
    "leaf": (16, lambda p: p),
    "view": (16, lambda p: p.view(16, 32)),
    "sum": (16, lambda p: torch.ones(16, 32) + p),
    "prompt": (4, lambda p: torch.cat([p, torch.ones(12, 32)])),
}


@pytest.mark.parametrize(("rows", "to_input"), TO_INPUT.values(), ids=TO_INPUT)
def test_gradients_of_leaves_add_up(rows: int, to_input) -> None:
    """`.grad` of a leaf is never memory that the next replay overwrites."""
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layers = [te.Linear(32, 32, device="cpu") for _ in range(2)]
        samples = [((sample(),), {}) for _ in layers]
        parts = graphs(layers, samples) if graphed else layers
        torch.manual_seed(1)
        p = torch.nn.Parameter(torch.randn(rows, 32))
        for _ in range(3):
            (parts[1](parts[0](to_input(p))) * torch.randn(16, 32)).sum().backward()
        found.append(p.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_gradients_of_what_replays_return_are_not_copied() -> None:
    first, second = graphs([torch.sin, torch.cos], [((sample(),), {}), ((sample(),), {})])
    grads = []
    y = first(sample())
    y.register_hook(grads.append)
    second(y).sum().backward()
    assert grads[0].data_ptr() == second.gradients[0].data_ptr()


def test_inputs_that_need_a_gradient_unlike_their_samples_are_refused() -> None:
    (part,) = graphs([te.Linear(32, 32, device="cpu")], [((torch.ones(16, 32),), {})])
    with pytest.raises(
        ValueError, match=r"expected argument 0 of callable 0 without requires_grad"
    ):
        part(sample())
    with torch.no_grad():
        part(sample())
    part(sample().detach()).sum().backward()


def test_samples_may_be_inputs_in_another_order() -> None:
    a, b = sample(), sample()
    (part,) = graphs([torch.sub], [((a, b), {})])
    expected = (b - a).detach()
    assert torch.equal(part(b, a), expected)


@pytest.mark.parametrize("view", [torch.t, lambda a: a[:1].expand(32, 32)], ids=["t", "expand"])
def test_views_of_samples_are_other_inputs(view) -> None:
    a = sample(32)
    (part,) = graphs([torch.exp], [((a,), {})])
    expected = view(a).exp().detach()
    assert torch.equal(part(view(a)), expected)


@pytest.mark.parametrize("size", [1, 32])
def test_numbers_are_no_tensors(size: int) -> None:
    (part,) = graphs([torch.mul], [((sample(), torch.full((size,), 2.0)), {})])
    with pytest.raises(ValueError, match=r"expected argument 1 of callable 0 as .*, got 2\.0"):
        part(sample(), 2.0)


def test_main_grad_may_be_none() -> None:
    layer = te.Linear(32, 32, device="cpu")
    layer.bias.main_grad = None
    (part,) = graphs([layer], [((sample(),), {})])
    part(sample()).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((32,), 16.0))


def test_parameters_that_are_unfrozen_after_the_capture_are_refused() -> None:
    layer = te.Linear(32, 32, device="cpu")
    layer.weight.requires_grad_(False)
    (part,) = graphs([layer], [((sample(),), {})])
    part(sample()).sum().backward()
    layer.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"callable 0 .*requires_grad=True for weight, whose"):
        part(sample())
    with torch.no_grad():
        part(sample())
