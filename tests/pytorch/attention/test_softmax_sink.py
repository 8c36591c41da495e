"""Softmax types with a sink, against their definition in float64."""

import math

import attention_reference as reference
import pytest
import torch
from cases.attention import cu_seqlens
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv
from layer_reference import relative_error

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import attention_backends

BATCH, HEADS, SIZE = 2, 4, 8
BOUND = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
TYPES = ("off-by-one", "learnable")
CASES = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "causal", "window": (2, 0), "groups": 2},
    "blind": {"mask": "causal_bottom_right", "queries": 9, "keys": 5},
    "arbitrary": {"mask": "arbitrary", "dtype": torch.bfloat16},
    "padding": {"mask": "padding", "groups": 1},
    "bias": {"bias": True, "dtype": torch.float16},
}


def attention_with_sink(query, key, value, seen, offset, bias=None):
    """The definition, batch first: the exponential of the sink is added to the denominator."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    per_group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(per_group, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
    if bias is not None:
        scores = scores + bias
    exponentials = scores.exp() * seen
    denominator = exponentials.sum(-1, keepdim=True) + offset.exp().view(1, -1, 1, 1)
    return (exponentials / denominator @ value).transpose(1, 2)


def make(kind, device, **changes):
    module = make_module(softmax_type=kind, **changes).to(device)
    if kind == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.tensor([0.5, -1.0, 2.0, -4.0]))
    return module


def make_mask(mask, window, queries, keys, device):
    """Returns the mask arguments of forward, and which keys each query sees."""
    lengths = [(queries, keys), (queries - 3, keys - 2)]
    arguments, arbitrary = {}, None
    if mask == "arbitrary":
        arbitrary = torch.rand(BATCH, 1, queries, keys) < 0.4
        arbitrary[0, 0, 1] = True
        arguments["attention_mask"] = arbitrary.to(device)
    elif mask == "padding":
        sides = zip(*lengths, strict=True)
        arguments["cu_seqlens_q"], arguments["cu_seqlens_kv"] = (
            cu_seqlens(side, device) for side in sides
        )
    return arguments, reference.seen_keys(mask, window, queries, keys, lengths, arbitrary)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_definition(device, kind, case):
    dtype, groups = case.get("dtype", torch.float32), case.get("groups", HEADS)
    queries, keys = case.get("queries", 7), case.get("keys", 7)
    mask, window = case.get("mask", "no_mask"), case.get("window")
    module = make(
        kind,
        device,
        num_gqa_groups=groups,
        qkv_format="bshd",
        attn_mask_type=mask,
        window_size=window,
    )
    arguments, seen = make_mask(mask, window, queries, keys, device)
    shapes = [(queries, HEADS), (keys, groups), (keys, groups)]
    inputs = [torch.randn(BATCH, *shape, SIZE).to(dtype) for shape in shapes]
    if case.get("bias"):
        inputs.append(torch.randn(1, HEADS, queries, keys).to(dtype))
    exact = [x.double().requires_grad_() for x in inputs]
    module_inputs = [x.to(device).requires_grad_() for x in inputs]
    offset = torch.zeros(HEADS, dtype=torch.float64)
    if kind == "learnable":
        offset = module.softmax_offset.detach().cpu().double().requires_grad_()
    if case.get("bias"):
        arguments["core_attention_bias_type"] = "post_scale_bias"
        arguments["core_attention_bias"] = module_inputs[3]
    out = module(*module_inputs[:3], **arguments)
    expected = attention_with_sink(*exact[:3], seen, offset, *exact[3:])
    result = out.view(expected.shape)
    assert out.dtype is dtype
    assert relative_error(result, expected) < BOUND[dtype]
    blind = ~seen.any(-1)[:, 0]
    assert result.detach().cpu()[blind].count_nonzero() == 0

    upstream = torch.randn(expected.shape).to(dtype)
    expected.backward(upstream.double())
    result.backward(upstream.to(device))
    for a, b in zip(module_inputs, exact, strict=True):
        assert relative_error(a.grad, b.grad) < 2 * BOUND[dtype]
    assert module_inputs[0].grad.cpu()[blind].count_nonzero() == 0
    if kind == "learnable":
        assert module.softmax_offset.grad.dtype is torch.float32
        assert relative_error(module.softmax_offset.grad, offset.grad) < 2 * BOUND[dtype]


def test_all_hidden_gives_zeros_and_no_gradient(device):
    module = make("learnable", device, attn_mask_type="arbitrary")
    inputs = make_qkv(device)
    hidden = torch.ones(1, 1, 5, 5, dtype=torch.bool, device=device)
    out = module(*inputs, attention_mask=hidden)
    out.sum().backward()
    assert out.count_nonzero() == 0
    for x in (*inputs, module.softmax_offset):
        assert x.grad.count_nonzero() == 0


def test_large_scores_do_not_overflow(device):
    q, k, v = make_qkv(device)
    for scale in (1e4, -1e4):
        out = make("off-by-one", device)(q * scale, k, v)
        assert out.isfinite().all()
    plain = make_module(attn_mask_type="no_mask")(q, k, v)
    far = make("learnable", device, attn_mask_type="no_mask")
    torch.nn.init.constant_(far.softmax_offset, -1e30)  # the weight of the sink is zero
    torch.testing.assert_close(far(q, k, v), plain)


def test_packed_sequences(device):
    module = make("learnable", device, qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = make_qkv(device, shape=(8, HEADS, SIZE), grad=False)
    ends = cu_seqlens([3, 5], device)
    out = module(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    alone = [
        module(*(x[None, part] for x in (q, k, v)), qkv_format="bshd", attn_mask_type="causal")[0]
        for part in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(out, torch.cat(alone))


def test_recomputation_and_dropout(device):
    module = make("learnable", device, attention_dropout=0.4)
    inputs = make_qkv(device)
    results = []
    for again in (False, True):
        torch.manual_seed(5)
        out = module(*inputs, checkpoint_core_attention=again)
        wanted = (*inputs, module.softmax_offset)
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_state():
    module = make_module(softmax_type="learnable")
    assert sorted(module.state_dict()) == ["_extra_state", "softmax_offset"]
    assert module.softmax_offset.shape == (HEADS,)
    assert not module.softmax_offset.any()
    for kind in ("vanilla", "off-by-one"):
        assert list(make_module(softmax_type=kind).state_dict()) == ["_extra_state"]
    layer = te.TransformerLayer(32, 48, 4, layer_type="decoder", softmax_type="learnable")
    found = [name for name, _ in layer.named_parameters() if "softmax" in name]
    assert found == [
        f"{attention}.core_attention.softmax_offset"
        for attention in ("self_attention", "inter_attention")
    ]


def test_meta_device():
    layer = te.MultiheadAttention(32, 4, softmax_type="learnable", device="meta")
    core = layer.core_attention
    assert core.softmax_offset.is_meta
    core.reset_parameters(defer_init=True)
    assert core.softmax_offset.is_meta
    core.reset_parameters()
    assert not core.softmax_offset.is_meta
    assert not core.softmax_offset.any()


@torch.no_grad()
def test_steps_with_a_cache_equal_one_call(device):
    layer = te.TransformerLayer(32, 48, 4, softmax_type="learnable", device=device).eval()
    torch.nn.init.normal_(layer.self_attention.core_attention.softmax_offset)
    x = torch.randn(6, BATCH, 32, device=device)
    params = te.InferenceParams(BATCH, 8)
    parts = []
    for part in x.split((3, 1, 2)):
        parts.append(layer(part, inference_params=params))
        params.sequence_len_offset += len(part)
    torch.testing.assert_close(torch.cat(parts), layer(x), rtol=1e-4, atol=1e-5)


def test_training_moves_the_offset(device):
    layer = te.TransformerLayer(32, 48, 4, softmax_type="learnable", device=device)
    layer(torch.randn(6, BATCH, 32, device=device)).square().sum().backward()
    offset = layer.self_attention.core_attention.softmax_offset
    assert offset.device.type == device
    assert offset.grad.all()


@pytest.mark.parametrize("kind", TYPES)
def test_other_backends_refuse(monkeypatch, kind):
    table = attention_backends(device="cpu", softmax_type=kind)
    assert table["unfused"] is None
    assert "softmax_type='vanilla'" in table["sdpa"]
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(
        ValueError, match=r"(?s)no dot product attention.*sdpa +refuses: has no sink"
    ):
        make_module(softmax_type=kind)(*make_qkv())
