"""Norms of the heads of queries and keys, against their definition in float64."""

import copy

import attention_reference
import layer_reference as reference
import pytest
import torch
from layer_reference import Heads, Norm, assert_same_gradients, bound_of, relative_error

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.l2norm import L2Normalization

BATCH, LENGTH, KEYS, HIDDEN, HEADS, SIZE = 2, 6, 9, 32, 4, 8
EPS = 1e-2  # large enough to change results
KINDS = ("RMSNorm", "LayerNorm", "L2Normalization")
CASES = {
    "default": {},
    "input-norm": {"input_layernorm": True, "num_gqa_groups": 2, "qkv_format": "bshd"},
    "fused": {"fuse_qkv_params": True},
    "bf16": {"params_dtype": torch.bfloat16, "qkv_format": "bshd"},
    "cross": {"attention_type": "cross"},
    "cross-fused": {"attention_type": "cross", "fuse_qkv_params": True, "num_gqa_groups": 2},
}


def make(kind, device="cpu", **changes):
    arguments = {"attention_dropout": 0.0, "device": device, "attn_mask_type": "no_mask"}
    norm = {"qk_norm_type": kind, "qk_norm_eps": EPS}
    module = te.MultiheadAttention(HIDDEN, HEADS, **{**arguments, **norm, **changes})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def normalised(x, kind, parameters, name):
    """Returns the norm of each head by its definition."""
    if kind == "L2Normalization":
        return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * parameters[f"{name}.weight"]
    return y + parameters[f"{name}.bias"] if kind == "LayerNorm" else y


def expected_of(module, kind, parameters, x, memory=None, angles=None, before=False):
    """Returns attention by its definition, with norms before or after the rotation."""
    below, heads, how = reference.below, Heads(**module.layout._asdict()), Norm()
    if memory is not None:
        query = reference.linear(x, below(parameters, "query_layer")).unflatten(-1, (HEADS, SIZE))
        pair = reference.linear(memory, below(parameters, "key_value"))
        key, value = reference.key_value(pair, heads)
    else:
        if module.input_layernorm:
            projection, _ = reference.norm_linear(x, below(parameters, "layernorm_qkv"), how)
        else:
            projection = reference.linear(x, below(parameters, "qkv"))
        query, key, value = reference.query_key_value(projection, heads)
    for step in ("norm", "turn") if before else ("turn", "norm"):
        if step == "norm":
            query = normalised(query, kind, parameters, "q_norm")
            key = normalised(key, kind, parameters, "k_norm")
        elif angles is not None:
            query, key = reference.rotated(query, angles), reference.rotated(key, angles)
    seen = torch.ones(len(x), 1, query.shape[1], key.shape[1], dtype=torch.bool)
    context = attention_reference.attention(query, key, value, seen)
    return reference.linear(context.flatten(2), below(parameters, "proj"))


def swapped(x, qkv_format):
    """Converts batch first to the format, or back."""
    return x if qkv_format == "bshd" else x.transpose(0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_definition(device, kind, case):
    module = make(kind, device, **case)
    dtype, qkv_format = case.get("params_dtype", torch.float32), case.get("qkv_format", "sbhd")
    inputs = [torch.randn(BATCH, LENGTH, HIDDEN).to(dtype)]
    if module.attention_type == "cross":
        inputs.append(torch.randn(BATCH, KEYS, HIDDEN).to(dtype))
    exact = [x.double().requires_grad_() for x in inputs]
    module_inputs = [
        swapped(x, qkv_format).contiguous().to(device).requires_grad_() for x in inputs
    ]
    out = module(
        module_inputs[0], encoder_output=module_inputs[1] if len(module_inputs) > 1 else None
    )
    parameters = reference.parameters_of(module)
    expected = expected_of(module, kind, parameters, *exact)
    result = swapped(out, qkv_format)
    bound = bound_of(dtype, device)
    assert out.dtype is dtype
    assert relative_error(result, expected) < bound
    upstream = torch.randn(expected.shape).to(dtype)
    expected.backward(upstream.double())
    result.backward(upstream.to(device))
    for a, b in zip(module_inputs, exact, strict=True):
        assert relative_error(swapped(a.grad, qkv_format), b.grad) < 2 * bound
    assert_same_gradients(module, parameters, 2 * bound)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_order_of_norm_and_rotation(device, kind, before):
    module = make(kind, device, qk_norm_before_rope=before)
    angles = te.RotaryPositionEmbedding(SIZE).to(device)(LENGTH)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    out = module(x.transpose(0, 1).to(device), rotary_pos_emb=angles).transpose(0, 1)
    parameters, turns = reference.parameters_of(module), angles[:, 0, 0].cpu()
    bound = bound_of(torch.float32, device)
    right = expected_of(module, kind, parameters, x.double(), None, turns, before)
    assert relative_error(out, right) < bound
    other = expected_of(module, kind, parameters, x.double(), None, turns, not before)
    same = kind == "L2Normalization"  # a rotation keeps lengths
    assert (relative_error(out, other) < bound) == same


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("named", [False, True])
@torch.no_grad()
def test_steps_with_a_cache_equal_one_call(device, named, before):
    layer = te.TransformerLayer(
        HIDDEN,
        48,
        HEADS,
        num_gqa_groups=2,
        attn_input_format="bshd",
        self_attn_mask_type="padding_causal" if named else "causal",
        qk_norm_type="RMSNorm",
        qk_norm_before_rope=before,
        device=device,
    ).eval()
    for norm in (layer.self_attention.q_norm, layer.self_attention.k_norm):
        norm.weight.copy_(torch.rand(SIZE) + 0.5)
    angles = te.RotaryPositionEmbedding(SIZE).to(device)(16)
    x = torch.randn(BATCH, LENGTH, HIDDEN, device=device)
    whole = layer(x, self_attn_mask_type="causal", rotary_pos_emb=angles)
    sizes = (2, SIZE, torch.float32) if named else ()
    params = te.InferenceParams(BATCH, 16, *sizes)
    parts = []
    for part in x.split((3, 1, 2), 1):
        if named:
            params.pre_step({name: part.shape[1] for name in range(BATCH)})
        parts.append(layer(part, inference_params=params, rotary_pos_emb=angles))
        params.sequence_len_offset += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_rows_of_a_batch(device):
    module = make("LayerNorm", device, qkv_format="thd", attn_mask_type="padding")
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    ends = torch.arange(0, (BATCH + 1) * LENGTH, LENGTH, dtype=torch.int32, device=device)
    out = module(x.flatten(0, 1).to(device), cu_seqlens_q=ends, cu_seqlens_kv=ends)
    expected = expected_of(module, "LayerNorm", reference.parameters_of(module), x.double())
    assert relative_error(out, expected.flatten(0, 1)) < bound_of(torch.float32, device)


NORM_KEYS = {"RMSNorm": ["weight"], "LayerNorm": ["weight", "bias"], "L2Normalization": []}


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict(kind):
    layer = te.TransformerLayer(32, 48, 4, layer_type="decoder", qk_norm_type=kind, device="cpu")
    keys = [key for key in layer.state_dict() if "_norm.weight" in key or "_norm.bias" in key]
    assert sorted(keys) == sorted(
        f"{attention}.{norm}.{key}"
        for attention in ("self_attention", "inter_attention")
        for norm in ("q_norm", "k_norm")
        for key in NORM_KEYS[kind]
    )
    attention = layer.self_attention
    assert (attention.q_norm is attention.k_norm) is (not NORM_KEYS[kind]), "one without parameters"
    layer.set_tensor_parallel_group(None)
    assert layer.self_attention.q_norm.eps == 1e-6
    if NORM_KEYS[kind]:
        assert layer.inter_attention.k_norm.weight.shape == (SIZE,)


def test_autocast_keeps_one_dtype():
    module = make("L2Normalization")
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype is torch.bfloat16
        assert make("RMSNorm")(x).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_length_one(device, dtype):
    x = torch.randn(3, 5, 64, device=device).to(dtype).requires_grad_()
    y = L2Normalization(64, EPS)(x)
    exact = x.detach().double().requires_grad_()
    expected = exact / (exact.square().sum(-1, keepdim=True) + EPS).sqrt()
    assert y.dtype is dtype
    upstream = torch.randn(3, 5, 64, device=device).to(dtype)
    y.backward(upstream)
    expected.backward(upstream.double())
    bound = 2 * torch.finfo(dtype).eps
    assert relative_error(y, expected) < bound
    assert relative_error(x.grad, exact.grad) < bound
    assert L2Normalization(64)(torch.zeros(2, 64)).count_nonzero() == 0


@pytest.mark.parametrize("module", [te.MultiheadAttention, te.TransformerLayer])
def test_unknown_type(module):
    sizes = (32, 4) if module is te.MultiheadAttention else (32, 48, 4)
    message = r"qk_norm_type None or in \{RMSNorm, LayerNorm, L2Normalization\}, got 'BatchNorm'"
    with pytest.raises(ValueError, match=message):
        module(*sizes, qk_norm_type="BatchNorm")


def test_the_gamma_of_lengths_is_filled_once(device):
    module, x = L2Normalization(SIZE), torch.randn(3, SIZE, device=device)
    with torch.inference_mode():
        expected = module(x)
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()  # autograd saves gamma, which inference mode has made
    assert torch.equal(module(x), expected) and leaf.grad is not None
    (gamma,) = module._gammas.values()
    module.bfloat16()
    assert module(x.double().to(torch.bfloat16)).dtype is torch.bfloat16
    assert [known is gamma for known in module._gammas.values()] == [True]
    assert not copy.deepcopy(module)._gammas and not module.state_dict()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = L2Normalization(SIZE)
        assert fake(torch.empty(3, SIZE, device=device)).shape == (3, SIZE) and not fake._gammas
