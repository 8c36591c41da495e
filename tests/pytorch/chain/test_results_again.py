"""The backward computes results of norms and activations again, so that GEMMs do not save them."""

import pytest
import torch
from precisions import RECIPES, scope
from rulers import assert_equal
from saved_memory import saved_storages

import transformer_engine.pytorch as te
from transformer_engine.pytorch import capture
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.fp8.casts.operands import PendingCast

HIDDEN, FFN = 32, 64
BYTES = {"high precision": 2, "delayed": 1, "current": 1}  # per element of the input of wgrad


def pair(monkeypatch, device, kind=te.LayerNormMLP, **arguments):
    """Two equal modules; the second one saves the inputs of its GEMMs."""
    made = dict(params_dtype=torch.bfloat16, device=device, **arguments)
    first, second = (kind(HIDDEN, FFN, **made) for _ in range(2))
    second.load_state_dict(first.state_dict())
    for step in second.chain.steps:
        monkeypatch.setattr(step.stage, "recomputes", lambda: "nothing")
    return first, second


def step(module, recipe, x, grad):
    """The saved bytes, the result and the gradients of the second of two steps.

    The second step runs from a recording if recording is on.
    """
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        with scope(recipe), saved_storages() as saved:
            y = module(leaf)
        y.backward(grad)
    return sum(saved.values()), [y, leaf.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("tokens", [64, 51])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_bits_and_less_memory(recipe, activation, tokens, recorded, device, monkeypatch):
    if not recorded:
        monkeypatch.setattr(Chain, "most_shapes", 0)
    again, saving = pair(monkeypatch, device, activation=activation)
    x = torch.randn(2, tokens, HIDDEN, device=device, dtype=torch.bfloat16)[0]
    grad = torch.randn_like(x)
    less, found = step(again, recipe, x, grad)
    more, expected = step(saving, recipe, x, grad)
    assert_equal(found, expected)
    if recipe == "blocks":  # GEMMs save inputs in blocks
        assert less == more
    else:
        of_norm = 2 * tokens * HIDDEN if recipe == "high precision" else 0
        assert more - less >= BYTES[recipe] * tokens * FFN + of_norm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("taps", [False, True])
@pytest.mark.parametrize("recipe", ["high precision", "delayed"])
def test_norms_without_a_tap_are_made_again_in_high_precision(
    recipe, taps, normalization, device, monkeypatch
):
    arguments = dict(normalization=normalization, return_layernorm_output=taps)
    again, saving = pair(monkeypatch, device, te.LayerNormLinear, **arguments)
    x = torch.randn(64, HIDDEN, device=device, dtype=torch.bfloat16)
    grads = torch.randn(2, 64, max(HIDDEN, FFN), device=device, dtype=torch.bfloat16)
    saved, results = [], []
    for module in (again, saving):
        leaf = x.clone().requires_grad_()
        with scope(recipe), saved_storages() as bytes_by_address:
            made = module(leaf)
        made = made if taps else [made]
        used = [grad[:, : y.shape[1]] for grad, y in zip(grads, made, strict=False)]
        torch.autograd.backward(made, used)
        saved.append(sum(bytes_by_address.values()))
        results.append([*made, leaf.grad, *[p.grad for p in module.parameters()]])
    assert_equal(*results)
    fewer = 0 if taps or recipe == "delayed" else 2 * x.numel()
    assert saved[1] - saved[0] == fewer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", ["high precision", "delayed", "current", "blocks"])
def test_columns_of_a_large_gradient_are_cast_when_wgrad_reads_them(
    recipe, bias, device, monkeypatch
):
    module, other = pair(monkeypatch, device, bias=bias)
    x = torch.randn(32, HIDDEN, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    expected = step(other, recipe, x, grad)[1]
    columns = []

    def cast(pending):
        made = _cast(pending)
        columns.append((made.rowwise is None, made.columnwise))
        return made

    _cast = PendingCast.cast
    monkeypatch.setattr(capture, "HOST_BOUND_BYTES", 0)
    monkeypatch.setattr(PendingCast, "cast", cast)
    assert_equal(step(module, recipe, x, grad)[1], expected)
    alone = [side for is_alone, side in columns if is_alone]
    assert bool(alone) == (recipe in ("delayed", "current"))
    assert all(side.codes.shape == (HIDDEN, 32) for side in alone)


@pytest.mark.parametrize("recipe", ["high precision", "delayed"])
@pytest.mark.parametrize("frozen", [["fc1_weight", "layer_norm_weight"], ["fc2_weight"]])
def test_frozen_weights(recipe, frozen, device, monkeypatch):
    again, saving = pair(monkeypatch, device)
    for module in (again, saving):
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
    x = torch.randn(32, HIDDEN, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    found, expected = (step(m, recipe, x, grad)[1] for m in (again, saving))
    assert_equal(found, expected)


@pytest.mark.parametrize("how", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_other_ways_of_weight_gradients(how, device, monkeypatch):
    modules = pair(monkeypatch, device, **{how: True})
    x = torch.randn(32, HIDDEN, device=device, dtype=torch.bfloat16)
    grads = []
    for module in modules:
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        results = step(module, "delayed", x, torch.ones_like(x))[1]
        if how == "delay_wgrad_compute":
            module.backward_dw()
            module.backward_dw()
            results = [*results[:2], *[p.grad for p in module.parameters()]]
        grads.append([*results, *[p.main_grad for p in module.parameters()]])
    assert_equal(*grads)


@pytest.mark.parametrize("recipe", ["high precision", "current"])
def test_a_graph_that_is_kept_gives_the_same_twice(recipe, device):
    module = te.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16, device=device)
    x = torch.randn(32, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    with scope(recipe):
        y = module(x)
    inputs = [x, *module.parameters()]
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    assert_equal(first, torch.autograd.grad(y.sum(), inputs))
