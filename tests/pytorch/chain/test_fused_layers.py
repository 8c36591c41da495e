"""Layers that run as one node of autograd's graph give the same bits as layers run part by part."""

import copy
import pickle

import pytest
import torch
from debug_session import debugging, logged, section
from fused_layers import KINDS, batch, build, is_fused, make_of, moved, results
from precisions import RECIPES, scope
from rulers import assert_bitwise
from torch.utils.checkpoint import checkpoint

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.chain import run_layer

CALLS = {
    "mask type": {"self_attn_mask_type": "no_mask"},
    "mask type as it is": {"self_attn_mask_type": "causal"},
    "window": {"window_size": (3, 0)},
    "mask": {
        "self_attn_mask_type": "arbitrary",
        "attention_mask": torch.ones(16, 16).triu(2).bool()[None, None],
    },
    "padding": {
        "self_attn_mask_type": "padding",
        "attention_mask": (torch.arange(16) > torch.tensor([[9], [15]]))[:, None, None],
    },
    "lengths": {
        "self_attn_mask_type": "padding_causal",
        "cu_seqlens_q": torch.tensor([0, 10, 26], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 10, 26], dtype=torch.int32),
    },
    "recomputed": {"checkpoint_core_attention": True},
    "slopes": {"core_attention_bias_type": "alibi"},
    "bias": {
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias": torch.ones(1, 4, 16, 16, dtype=torch.bfloat16).triu(),
    },
    "rotation": {"rotary_pos_emb": te.RotaryPositionEmbedding(8)(40)},
    "first microbatch": {"is_first_microbatch": True},
}
pairs = pytest.mark.parametrize(
    ("kind", "recipe"),
    [("encoder", recipe) for recipe in RECIPES]
    + [(kind, "high precision" if i % 2 else "delayed") for i, kind in enumerate(KINDS)],
)


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    """Makes the order in which gradients are added deterministic."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


@pytest.fixture
def by_parts(monkeypatch):
    """A function: after it is called, every layer runs part by part."""
    return lambda: monkeypatch.setattr(run_layer, "_may_fuse", lambda x: False)


def assert_same(make, recipe, device, by_parts, **call):
    """Asserts that a fused layer and an equal layer that runs part by part give the same bits."""
    call = moved(call, device)
    fused, counts, y = results(make(), recipe, device, **call)
    assert is_fused(y)
    by_parts()
    parts, expected, y = results(make(), recipe, device, **call)
    assert not is_fused(y)
    assert counts == expected
    for ours, theirs in zip(fused, parts, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and ours.shape == (4,) and device == "cuda":
            # The gradient of a sink: cuDNN adds it in an order that is not deterministic.
            torch.testing.assert_close(ours, theirs)
        elif ours is not None:
            assert_bitwise(ours, theirs)


@pairs
def test_every_arrangement(device, kind, recipe, by_parts):
    call = {"encoder_output": batch(device, 5, 24).detach()} if "decoder" in kind else {}
    assert_same(lambda: make_of(kind, device), recipe, device, by_parts, **call)


@pytest.mark.parametrize("name", CALLS)
def test_every_argument(device, name, by_parts):
    recipe = "delayed" if len(name) % 2 else "high precision"
    assert_same(lambda: build(device), recipe, device, by_parts, **CALLS[name])


def test_gradients_of_encoder_output_and_bias(device, by_parts):
    def run():
        layer = build(device, layer_type="decoder")
        encoder, x = batch(device, 5), batch(device)
        bias = torch.zeros(1, 4, 16, 16, dtype=torch.bfloat16, device=device).requires_grad_()
        y = layer(
            x,
            encoder_output=encoder,
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=bias,
        )
        y.square().sum().backward()
        return [y, x.grad, encoder.grad, bias.grad]

    fused = run()
    assert is_fused(fused[0])
    by_parts()
    for ours, theirs in zip(fused, run(), strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.parametrize("recipe", ["high precision", "delayed"])
@pytest.mark.parametrize("frozen", ["qkv.weight", "proj", "mlp", "self_attention"])
def test_what_needs_no_gradient_gets_none(device, frozen, recipe, by_parts):
    def make():
        layer = build(device, fuse_qkv_params=True)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return layer

    assert_same(make, recipe, device, by_parts)
    layer, x = make(), batch(device).detach()
    with scope(recipe):
        y = layer(x)
    y.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", ["encoder", "groups", "interleaved groups", "sbhd, fused weights"])
def test_rotation(device, kind, pair, by_parts):
    angles = te.RotaryPositionEmbedding(8)(40).to(device)
    if pair:
        angles = (angles, angles.bfloat16() * 0.5)
    arguments = {**KINDS[kind], "rotary_pos_interleaved": pair}
    assert_same(
        lambda: build(device, **arguments), "delayed", device, by_parts, rotary_pos_emb=angles
    )


def test_angles_are_checked_and_saved(device):
    layer, x = build(device), batch(device)
    angles = te.RotaryPositionEmbedding(16)(16).to(device)
    with pytest.raises(ValueError, match=r"expected freqs for at least 16 .* \(layer layer"):
        layer(x, rotary_pos_emb=angles[:9])
    y = layer(x, rotary_pos_emb=angles)
    assert is_fused(y)
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
    """The step ends in the backward of the first layer."""

    def run():
        model = torch.nn.Sequential(build(device, name="a"), build(device, name="b"))
        return results(model, "delayed", device)[0]

    fused = run()
    by_parts()
    for ours, theirs in zip(fused, run(), strict=True):
        assert_bitwise(ours, theirs)


def test_statistics(device, by_parts, tmp_path):
    """A session logs the same statistics, in every second step, however the layer runs."""

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

    rows, gradients = run(tmp_path / "fused")
    assert {row[0] for row in rows} == {0, 2}
    by_parts()
    expected, theirs = run(tmp_path / "parts")
    assert rows == expected
    for ours, other in zip(gradients, theirs, strict=True):
        assert_bitwise(ours, other)


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

    fused = run()
    by_parts()
    for ours, theirs in zip(fused, run(), strict=True):
        assert_bitwise(ours, theirs)


def test_gradients_of_an_unused_result_and_copies(device):
    layer, x = build(device), batch(device)
    y = copy.deepcopy(layer)(x)
    assert is_fused(y)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    (again,) = torch.autograd.grad(y.transpose(0, 1).sum(), x)
    assert_bitwise(grad, again)


def test_gradients_of_gradients_are_an_error_in_words(device):
    layer, x = build(device), batch(device)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        grad.sum().backward()


def test_the_data_flow_is_printed():
    layer = build(layer_type="decoder", drop_path_rate=0.1)
    layer(batch(), encoder_output=batch(seed=4))
    (fused,) = layer._fused.values()
    lines = str(fused.chain).splitlines()
    assert [line.split()[0] for line in lines].count("attention") == 2
    assert lines[-1] == "returns hidden_states"


@pytest.mark.parametrize("kind", ["encoder", "attention alone"])
def test_layers_that_ran_are_pickled(device, kind):
    layer = make_of(kind, device)
    y = layer(batch(device))
    assert is_fused(y)
    again = pickle.loads(pickle.dumps(layer))
    assert_bitwise(again(batch(device)), y)


def test_a_schedule_of_dropout_keeps_few_chains():
    layer, x = build(), batch()
    for step in range(40):
        layer.hidden_dropout = step / 100
        assert is_fused(layer(x))
    assert len(layer._fused) <= 16


def test_replicas_have_parameters_of_their_own():
    """The replicas are made as `torch.nn.parallel.replicate` makes them in each step."""
    layer, x = build(), batch()
    layer(x)
    modules = [*layer.modules()]
    for factor in (1.0, 0.5):
        replicas = [module._replicate_for_data_parallel() for module in modules]
        for module, replica in zip(modules, replicas, strict=True):
            for name, child in module._modules.items():
                replica._modules[name] = child and replicas[modules.index(child)]
            for name, parameter in module._parameters.items():
                setattr(replica, name, None if parameter is None else parameter.detach() * factor)
        expected = copy.deepcopy(layer)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter.mul_(factor)
        assert_bitwise(replicas[0](x), expected(x))


def test_a_call_with_a_cache_plans_each_part_once(monkeypatch):
    """Weights in several parameters are joined for each plan."""
    layer = te.TransformerLayer(32, 64, 2, device="cpu", layer_number=1).eval()
    joined = []
    own = te.LayerNormLinear.chain_parameters
    monkeypatch.setattr(
        te.LayerNormLinear, "chain_parameters", lambda module: joined.append(0) or own(module)
    )
    params = te.InferenceParams(1, 16)
    with torch.no_grad():
        for tokens in (4, 1, 1):
            layer(torch.ones(tokens, 1, 32), inference_params=params)
            params.sequence_len_offset += tokens
    assert len(joined) == 3
