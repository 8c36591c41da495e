"""Layers as one autograd function: the same bits as part by part, and part by part where it must.

On the CPU a stand-in plays cuDNN.
"""

import copy

import pytest
import torch
from cases import fake_cudnn
from debug_session import debugging, logged, section
from precisions import RECIPES, scope
from rulers import assert_bitwise
from torch.utils.checkpoint import checkpoint

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.backends import unfused
from transformer_engine.pytorch.attention.core import attention as core
from transformer_engine.pytorch.attention.core import plain
from transformer_engine.pytorch.module import transformer_layer, whole_layer

KINDS = {
    "bshd": {},
    "sbhd, own weights": {"attn_input_format": "sbhd", "fuse_qkv_params": False},
    "groups": {"num_gqa_groups": 2, "qkv_weight_interleaved": False},
    "interleaved groups": {"num_gqa_groups": 2, "kv_channels": 24},
    "RMSNorm, swiglu": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
    "window": {"window_size": (5, 0), "layer_number": 3},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "no mask": {"self_attn_mask_type": "no_mask", "zero_centered_gamma": True},
}
pairs = pytest.mark.parametrize(
    ("kind", "recipe"),
    [("bshd", recipe) for recipe in RECIPES]
    + [(kind, "high precision" if i % 2 else "delayed") for i, kind in enumerate(KINDS)],
)


@pytest.fixture(autouse=True)
def _with_cudnn(request, monkeypatch):
    """cuDNN attends: itself where there is a GPU."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cuda":
        problem = {"num_attention_heads": 4, "kv_channels": 16, "device": "cuda"}
        if reason := te.attention_backends(**problem)["cudnn"]:
            pytest.skip(reason)
        return
    fake_cudnn.serve(monkeypatch)


@pytest.fixture
def by_parts(monkeypatch):
    """A switch: no layer runs whole any more."""
    return lambda: monkeypatch.setattr(transformer_layer, "whole_layer", lambda *_: None)


def build(device, **more):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    options |= {"fuse_qkv_params": True, "params_dtype": torch.bfloat16, "name": "layer"}
    return te.TransformerLayer(64, 128, 4, device=device, **{**options, **more})


def batch(device, seed=1):
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16).requires_grad_()


def is_whole(y):
    return type(y.grad_fn).__name__ == "_LayerFunctionBackward"


def results(layer, recipe, device, steps=3, **call):
    """Everything that a few steps and an evaluation leave behind."""
    found = []
    te.gemm_report(reset=True)
    for step in range(steps):
        x = batch(device, step)
        with scope(recipe):
            y = layer(x, **call)
        y.backward(batch(device, step + 9).detach())
        found += [y, x.grad, *(p.grad for p in layer.parameters())]
        for p in layer.parameters():
            p.grad = None
    layer.eval()
    with torch.no_grad(), scope(recipe):
        found.append(layer(x))
    layer.train()
    for module in layer.modules():
        found += [s.amax_history for s in getattr(module, "scaling", {}).values()]
    return found, te.gemm_report(reset=True), y


def assert_same(make, recipe, device, by_parts, **call):
    """Both ways, on layers of their own."""
    whole, counts, y = results(make(), recipe, device, **call)
    assert is_whole(y)
    by_parts()
    parts, expected, y = results(make(), recipe, device, **call)
    assert not is_whole(y)
    assert counts == expected
    for ours, theirs in zip(whole, parts, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None:
            assert_bitwise(ours, theirs)


@pairs
def test_the_same_bits(device, kind, recipe, by_parts):
    assert_same(lambda: build(device, **KINDS[kind]), recipe, device, by_parts)


@pytest.mark.parametrize("recipe", ["high precision", "delayed"])
@pytest.mark.parametrize("frozen", ["qkv.weight", "proj", "mlp"])
def test_what_needs_no_gradient_gets_none(device, frozen, recipe, by_parts):
    def make():
        layer = build(device)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return layer

    assert_same(make, recipe, device, by_parts)
    layer, x = build(device), batch(device).detach()
    with scope(recipe):
        y = layer(x)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    for p in layer.self_attention.layernorm_qkv.parameters():
        p.requires_grad_(False)
    with scope(recipe):
        assert not is_whole(layer(x))  # nothing before attention needs a gradient


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", ["bshd", "groups", "interleaved groups", "sbhd, own weights"])
def test_rotation(device, kind, pair, by_parts):
    angles = te.RotaryPositionEmbedding(8)(40).to(device)
    if pair:
        angles = (angles, angles.bfloat16() * 0.5)
    arguments = {**KINDS[kind], "rotary_pos_interleaved": pair}
    assert_same(
        lambda: build(device, **arguments), "delayed", device, by_parts, rotary_pos_emb=angles
    )


def test_angles_are_checked_and_kept(device):
    layer, x = build(device), batch(device)
    angles = te.RotaryPositionEmbedding(16)(16).to(device)
    with pytest.raises(ValueError, match=r"expected freqs for at least 16 .* \(layer layer\)"):
        layer(x, rotary_pos_emb=angles[:9])
    y = layer(x, rotary_pos_emb=angles)
    assert is_whole(y)
    angles.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("first", [True, False])
def test_microbatches(device, first, by_parts):
    def make():
        layer = build(device)
        with scope("delayed"):
            layer(batch(device), is_first_microbatch=True)
        return layer

    assert_same(make, "delayed", device, by_parts, is_first_microbatch=first)


def test_weights_in_fp8(device, by_parts):
    def make():
        with te.fp8_model_init(enabled=True, recipe=DelayedScaling()):
            return build(device)

    assert_same(make, "delayed", device, by_parts)


def test_several_layers_in_one_scope(device, by_parts):
    """The first one's backward ends the step."""

    def make():
        return torch.nn.Sequential(build(device, name="a"), build(device, name="b"))

    assert_same(make, "delayed", device, by_parts)


def test_statistics(device, by_parts, tmp_path):
    """A session looks into chains: in steps of its choice, whichever way the layer runs."""

    def run(folder):
        what = {"stats": ["mean", "max"], "tensors": ["activation", "gradient"], "freq": 2}
        layer = build(device)
        with debugging(folder, section("LogTensorStats", **what)):
            for step in range(3):
                with scope("delayed"):
                    y = layer(batch(device, step))
                y.sum().backward()
                debug_api.step()
        return logged(folder), [p.grad for p in layer.parameters()]

    rows, gradients = run(tmp_path / "whole")
    assert {row[0] for row in rows} == {0, 2}
    by_parts()
    expected, theirs = run(tmp_path / "parts")
    assert rows == expected
    for ours, other in zip(gradients, theirs, strict=True):
        assert_bitwise(ours, other)


def tracker():
    states = te.CudaRNGStatesTracker()
    states.add("model-parallel-rng", 1)
    return states


def hook(module):
    module.register_forward_hook(lambda *_: None)


BF16 = {"params_dtype": torch.bfloat16, "device": "cpu"}
LOOKS = {
    "hook on a module": lambda layer: hook(layer.self_attention.proj),
    "hook before a module": lambda layer: layer.layernorm_mlp.register_forward_pre_hook(
        lambda *_: None
    ),
    "hook on a backward": lambda layer: layer.self_attention.register_full_backward_hook(
        lambda *_: None
    ),
    "forward of its own": lambda layer: setattr(
        layer.self_attention.core_attention,
        "forward",
        layer.self_attention.core_attention.forward,
    ),
    "another class": lambda layer: setattr(
        layer.self_attention, "proj", type("Mine", (te.Linear,), {})(64, 64, **BF16)
    ),
    "subclass": lambda layer: setattr(
        layer.layernorm_mlp, "__class__", type("Mine", (te.LayerNormMLP,), {})
    ),
    "checkpointed MLP": lambda layer: setattr(layer.layernorm_mlp, "checkpoint", True),
    "dropout of a tracker": lambda layer: layer.self_attention.core_attention.__dict__.update(
        attention_dropout=0.1, get_rng_state_tracker=tracker
    ),
}


@pytest.mark.parametrize("look", LOOKS)
def test_parts_that_somebody_looks_at(look):
    layer = build("cpu")
    assert is_whole(layer(batch("cpu")))
    LOOKS[look](layer)
    assert not is_whole(layer(batch("cpu")))


ARGUMENTS = {
    "mask type": {"self_attn_mask_type": "no_mask"},
    "window": {"window_size": (3, 0)},
    "mask": {"attention_mask": torch.zeros(2, 1, 16, 16, dtype=torch.bool)},
    "checkpoint": {"checkpoint_core_attention": True},
    "slopes": {"core_attention_bias_type": "alibi"},
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_of_attention(arguments):
    assert not is_whole(build("cpu")(batch("cpu"), **ARGUMENTS[arguments]))


OTHERS = {
    "parallel": {"parallel_attention_mlp": True},
    "norm at the end": {"output_layernorm": True},
    "dropped paths": {"drop_path_rate": 0.2},
    "norms of heads": {"qk_norm_type": "RMSNorm"},
    "sink": {"softmax_type": "learnable"},
    "padding": {"self_attn_mask_type": "padding"},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_another_kind(kind, monkeypatch):
    monkeypatch.setattr(core, "choose", lambda *call: unfused.BACKEND)
    layer, x = build("cpu", **OTHERS[kind]), batch("cpu")
    mask = torch.zeros(2, 1, 1, 16, dtype=torch.bool) if kind == "padding" else None
    assert not is_whole(layer(x, mask))


def test_surroundings(monkeypatch):
    layer, x = build("cpu"), batch("cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not is_whole(layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_whole(layer(x))
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_dpa=True)):
        plan = whole_layer._is_quiet(x, "layer")
    assert not plan
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_whole(layer(x))
    handle.remove()
    assert is_whole(layer(x))
    monkeypatch.setattr(whole_layer, "_MOST_BYTES", x.nbytes - 1)
    assert not is_whole(layer(x))


def test_another_backend_is_chosen(monkeypatch):
    layer, x = build("cpu"), batch("cpu")
    assert is_whole(layer(x))
    for module in (core, plain):
        monkeypatch.setattr(module, "choose", lambda *call: unfused.BACKEND)
    assert not is_whole(layer(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["high precision", "delayed"])
def test_checkpoints(device, reentrant, recipe, by_parts):
    def run():
        found = []
        for make in (checkpoint, te.checkpoint):
            layer, x = build(device), batch(device)
            for _ in range(2):
                with scope(recipe):
                    y = make(layer, x, use_reentrant=reentrant)
                y.sum().backward()
            found += [y, x.grad, *(p.grad for p in layer.parameters())]
        return found

    whole = run()
    by_parts()
    for ours, theirs in zip(whole, run(), strict=True):
        assert_bitwise(ours, theirs)


def test_gradients_of_an_unused_result_and_copies(device):
    layer, x = build(device), batch(device)
    y = copy.deepcopy(layer)(x)
    assert is_whole(y)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    (again,) = torch.autograd.grad(y.transpose(0, 1).sum(), x)
    assert_bitwise(grad, again)
