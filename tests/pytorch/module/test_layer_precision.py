"""TransformerLayer in FP8: close to fp32, every GEMM in FP8, weights cached, gradients in place."""

import pytest
import torch
from layer_reference import assert_near, relative_error

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.kernels.norm import norm_backward

LENGTH, BATCH, HIDDEN, FFN, HEADS = 8, 2, 64, 128, 4
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
# FP8 with 3 mantissa bits has rounding errors of up to 2^-4. The errors of a layer's GEMMs add in
# quadrature, and half of the output is the residual, which has no error. Gradients may have 2 bits.
OUTPUT_BOUND, GRADIENT_BOUND = 0.06, 0.2


def make(device, **changes):
    arguments = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device, **changes}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, **arguments)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1 and "norm_" not in name:
                parameter.mul_(4)
    return layer


def run(layer, x, upstream, recipe, **arguments):
    """Output and gradients: of the input, then of the parameters."""
    for parameter in layer.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        out = layer(x, **arguments)
    out.backward(upstream)
    return out.detach(), x.grad, *(p.grad for p in layer.parameters())


@pytest.mark.parametrize("changes", [{}, {"fuse_qkv_params": True}, {"layer_type": "decoder"}])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_close_to_fp32_and_all_gemms_in_fp8(device, recipe, changes):
    layer = make(device, **changes)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    upstream = torch.randn_like(x)
    memory = {"encoder_output": torch.randn_like(x)} if "layer_type" in changes else {}
    exact = run(layer, x, upstream, None, **memory)
    for _ in range(2):  # delayed scaling knows its scales from the second step on
        te.gemm_report(reset=True)
        found = run(layer, x, upstream, recipe, **memory)
    report = te.gemm_report()
    # Cross-attention adds three layers. The encoder's output needs no gradient: one GEMM less.
    assert report.total("fp8") == (3 * 4 if not memory else 3 * 7 - 1)
    assert report.total("fp32") == 0
    assert 1e-4 < relative_error(found[0], exact[0]) < OUTPUT_BOUND
    for got, wanted in zip(found[1:], exact[1:], strict=True):
        if float(wanted.norm()) > 1e-4:  # a bias of keys does not change the softmax
            assert relative_error(got, wanted) < GRADIENT_BOUND


def test_cached_weights(device):
    """Later micro-batches use the FP8 weights of the first, even if the parameters change."""
    layer = make(device)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    recipe = RECIPES["current"]
    first = run(layer, x, x, recipe, is_first_microbatch=True)
    with torch.no_grad():
        layer.layernorm_mlp.fc1_weight.mul_(2)
    again = run(layer, x, x, recipe, is_first_microbatch=False)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], run(layer, x, x, recipe)[0])


@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["fp32", "current"])
def test_gradients_accumulate_in_main_grad(device, recipe):
    layer = make(device, fuse_wgrad_accumulation=True, fuse_qkv_params=True)
    plain = make(device, fuse_qkv_params=True)
    plain.load_state_dict(layer.state_dict())
    weights = {n: p for n, p in layer.named_parameters() if p.dim() > 1}
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    upstream = torch.randn_like(x)
    run(plain, x, upstream, recipe)
    for first in (True, False):
        run(layer, x, upstream, recipe, is_first_microbatch=first)
    for name, expected in plain.named_parameters():
        if name in weights:
            assert_near(weights[name].main_grad, 2 * expected.grad, device)


def test_residual_gradients_join_inside_the_norms(device, monkeypatch):
    """The kernel of the norm's backward adds them, so that no other kernel needs to."""
    joined = []

    def spy(*arguments):
        joined.append(arguments[-1] is not None)
        return norm_backward(*arguments)

    monkeypatch.setattr("transformer_engine.pytorch.chain.stages.norm.norm_backward", spy)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    run(make(device), x, x, None)
    assert joined == [True, True]


def test_input_of_a_norm_alone_passes_its_gradient(device):
    module = te.LayerNormLinear(HIDDEN, HIDDEN, return_input=True, device=device)
    x = torch.randn(BATCH, HIDDEN, device=device, requires_grad=True)
    _, same = module(x)
    assert torch.equal(same, x)
    (same * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert module.weight.grad is None


def test_recomputed_attention_changes_nothing(device, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    layer = make(device, attention_dropout=0.3, hidden_dropout=0.2)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(1)
        results.append(run(layer, x, x, RECIPES["current"], checkpoint_core_attention=checkpoint))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("arguments", [{}, {"core_attention_bias_type": "alibi"}], ids=str)
def test_compiles_as_one_graph(device, arguments):
    layer = make(device, fuse_qkv_params=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    expected = run(layer, x, x, None, **arguments)
    for a, b in zip(run(compiled, x, x, None, **arguments), expected, strict=True):
        assert_near(a, b, device)


@pytest.mark.parametrize("tokens", [32, 19])
def test_an_input_that_is_kept_as_it_came_changes_no_bit(device, tokens):
    x = torch.randn(tokens, 32, device=device, dtype=torch.bfloat16)
    layers = [te.Linear(32, 48, device=device, params_dtype=torch.bfloat16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].save_original_input = True
    saved_shapes, results = [], []
    for layer in layers:
        saved = []
        leaf = x.clone().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        )
        for _ in range(2):  # the second call may run from a recording
            leaf.grad = layer.weight.grad = layer.bias.grad = None
            with hooks, te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
                out = layer(leaf)
            out.backward(torch.ones_like(out))
        saved_shapes.append([(t.dtype, tuple(t.shape)) for t in saved])
        results.append((out, leaf.grad, layer.weight.grad, layer.bias.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    original = (torch.bfloat16, (tokens, 32))
    assert original in saved_shapes[1] and original not in saved_shapes[0]
    refused = pytest.raises(ValueError, match="save_original_input with DelayedScaling")
    with refused, te.fp8_autocast():
        layers[1](x)
