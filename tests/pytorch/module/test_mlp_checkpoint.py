"""`LayerNormMLP(checkpoint=True)`: less memory, the same bits, in every precision."""

import copy

import pytest
import torch
from checkpoint_helpers import MODES, uncheckpointed
from precisions import RECIPES, scope
from rulers import assert_equal
from saved_memory import saved_storages

import transformer_engine.pytorch as te
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast

SETTINGS = {
    "plain": {},
    "gated, RMSNorm": {"activation": "swiglu", "normalization": "RMSNorm"},
    "no biases": {"bias": False},
    "bias returned": {"return_bias": True},
    "norm returned": {"return_layernorm_output": True},
    "input returned": {"return_input": True},
}


def pair(device="cpu", **settings):
    """Two equal layers: one without `checkpoint`, and one with it."""
    torch.manual_seed(1)
    plain = te.LayerNormMLP(32, 64, device=device, params_dtype=torch.float32, **settings)
    again = copy.deepcopy(plain)
    again.checkpoint = True
    return plain, again


def train(layer, recipe, device="cpu", wrap=uncheckpointed, firsts=(None, None, None)):
    """Results, gradients and FP8 state of some steps."""
    reset_autocast()
    generator = torch.Generator().manual_seed(0)
    found = []
    for i, first in enumerate(firsts):
        x = (torch.randn(16, 32, generator=generator) * (i + 1)).to(device).requires_grad_()
        with scope(recipe):
            out = wrap(lambda x, first=first: layer(x, is_first_microbatch=first), x)
        outs = [y for y in (out if isinstance(out, tuple) else (out,)) if y is not None]
        sum(y.square().mean() for y in outs).backward()
        found += [*(y.detach() for y in outs), x.grad]
    found += [p.grad for p in layer.parameters() if p.grad is not None]
    return found + [t.clone() for s in layer.scaling.values() for t in (s.scale, s.amax_history)]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_to_a_layer_without(recipe, settings, device):
    plain, again = pair(device, **settings)
    assert_equal(train(again, recipe, device), train(plain, recipe, device))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_micro_batches(recipe):
    firsts = (True, False, True, False)
    plain, again = pair()
    assert_equal(train(again, recipe, firsts=firsts), train(plain, recipe, firsts=firsts))


@pytest.mark.parametrize("recipe", ["delayed", "current", "blocks"])
def test_micro_batches_without_a_first(recipe):
    """The first call casts the weights, so it cannot run from a recording as a whole."""
    plain, again = pair(delay_wgrad_compute=True)
    firsts = (False, False)
    assert_equal(train(again, recipe, firsts=firsts), train(plain, recipe, firsts=firsts))


@pytest.mark.parametrize("mode", MODES)
def test_within_other_checkpoints(mode):
    plain, again = pair()
    assert_equal(train(again, "delayed", wrap=MODES[mode]), train(plain, "delayed"))


@pytest.mark.parametrize("recipe", ["delayed", "blocks"])
def test_weights_kept_in_fp8(recipe, device):
    with te.quantized_model_init(recipe=RECIPES[recipe]):
        plain, again = pair(device)
    assert_equal(train(again, recipe, device), train(plain, recipe, device))


def saved_bytes(layer, recipe):
    """Bytes that autograd saves for the backward, without parameters, and bytes of the input."""
    x = torch.randn(128, 32, requires_grad=True)
    with scope(recipe), saved_storages() as seen:
        y = layer(x)
    y.sum().backward()
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    return sum(size for where, size in seen.items() if where not in own), x.nbytes


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_input_is_kept(recipe):
    plain, again = pair()
    saved, input_bytes = saved_bytes(again, recipe)
    assert saved == input_bytes < saved_bytes(plain, recipe)[0] / 2


def test_the_forward_runs_again():
    te.gemm_report(reset=True)
    train(pair()[1], "delayed", firsts=(None,))
    report = te.gemm_report()
    assert {(gemm, count) for (_, gemm, _), count in report.counts.items()} == {
        ("fprop", 2),
        ("dgrad", 1),
        ("wgrad", 1),
    }


def test_without_gradients_it_runs_once():
    layer = pair()[1]
    te.gemm_report(reset=True)
    with torch.no_grad(), scope("current"):
        layer(torch.randn(16, 32))
    assert te.gemm_report().total() == 2


def test_gradients_of_a_part():
    """An input without a gradient, and `torch.autograd.grad`."""
    found = []
    for layer in pair():
        y = layer(torch.ones(4, 32))
        found.append(torch.autograd.grad(y.square().sum(), [layer.fc1_weight, layer.fc2_bias]))
    assert_equal(*found)


def test_exported_graphs_hold_the_layer_alone():
    layer, x = pair()[1].eval(), torch.randn(4, 32)
    with te.onnx_export(enabled=True):
        program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


def test_the_constructor_takes_it():
    assert te.LayerNormMLP(32, 64, checkpoint=True, device="cpu").checkpoint
    assert not te.LayerNormMLP(32, 64, device="cpu").checkpoint


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_belong_to_the_parameters_of_the_forward(recipe):
    found = []
    for layer in pair():
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
        own = {name: (p.detach() * 2).requires_grad_() for name, p in layer.named_parameters()}
        with scope(recipe):
            out = torch.func.functional_call(layer, own, (x,))
        out.square().sum().backward()
        found.append([out, *(p.grad for p in own.values()), *(p.grad for p in layer.parameters())])
    assert_equal(*found)
