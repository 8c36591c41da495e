"""MultiheadAttention against the definition; parameter layouts, returns, names, errors."""

import attention_reference
import layer_reference as reference
import pytest
import torch
from layer_reference import (
    Heads,
    Norm,
    assert_near,
    assert_same_gradients,
    bound_of,
    relative_error,
)

from transformer_engine.pytorch import capture
from transformer_engine.pytorch.attention import MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

BATCH, LENGTH, HIDDEN, HEADS = 2, 6, 32, 4

CASES = {
    "default": {},
    "fused": {"fuse_qkv_params": True},
    "fused-not-interleaved": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "groups": {"num_gqa_groups": 2, "input_layernorm": True},
    "fused-groups": {"num_gqa_groups": 2, "fuse_qkv_params": True, "input_layernorm": True},
    "fused-one-group": {"num_gqa_groups": 1, "fuse_qkv_params": True},
    "channels": {"kv_channels": 16, "qkv_format": "bshd", "bias": False},
    "rms": {"input_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
    "bf16": {"params_dtype": torch.bfloat16, "input_layernorm": True, "qkv_format": "bshd"},
    "cross": {"attention_type": "cross"},
    "cross-norm": {"attention_type": "cross", "input_layernorm": True, "num_gqa_groups": 2},
    "cross-fused": {"attention_type": "cross", "fuse_qkv_params": True, "input_layernorm": True},
    "cross-fused-flat": {
        "attention_type": "cross",
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
        "qkv_format": "bshd",
    },
}


def make(device="cpu", **changes):
    arguments = {"attention_dropout": 0.0, "device": device, "attn_mask_type": "no_mask"}
    module = MultiheadAttention(HIDDEN, HEADS, **{**arguments, **changes})
    with torch.no_grad():  # so that biases and norms change the result
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "norm" not in name:
                parameter.mul_(8)
    return module


def heads_of(module):
    return Heads(**module.layout._asdict())


def how_of(case):
    return Norm(case.get("normalization", "LayerNorm"), case.get("zero_centered_gamma", False))


def swapped(x, qkv_format):
    """Converts batch first to the format, or back."""
    return x.transpose(0, 1) if qkv_format == "sbhd" else x


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_definition(device, case):
    module = make(device, **case)
    dtype = case.get("params_dtype", torch.float32)
    qkv_format = case.get("qkv_format", "sbhd")
    cross = case.get("attention_type") == "cross"
    keys = 9 if cross else LENGTH
    x = torch.randn(BATCH, LENGTH, HIDDEN).to(dtype)
    memory = torch.randn(BATCH, keys, HIDDEN).to(dtype) if cross else None
    exact = [t.double().requires_grad_() for t in (x, memory) if t is not None]
    module_inputs = [
        swapped(t, qkv_format).contiguous().to(device).requires_grad_()
        for t in (x, memory)
        if t is not None
    ]
    out = module(module_inputs[0], encoder_output=module_inputs[1] if cross else None)
    parameters = reference.parameters_of(module)
    seen = torch.ones(BATCH, 1, LENGTH, keys, dtype=torch.bool)
    expected, _ = reference.multi_head(
        parameters, exact[0], seen, heads_of(module), how_of(case), exact[1] if cross else None
    )
    result = swapped(out, qkv_format)
    assert out.dtype is dtype
    assert relative_error(result, expected) < bound_of(dtype, device)
    upstream = torch.randn(expected.shape).to(dtype)
    expected.backward(upstream.double())
    result.backward(upstream.to(device))
    for a, b in zip(module_inputs, exact, strict=True):
        assert relative_error(swapped(a.grad, qkv_format), b.grad) < 2 * bound_of(dtype, device)
    assert_same_gradients(module, parameters, 2 * bound_of(dtype, device))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_rotary(device, qkv_format, pair):
    module = make(device, attn_mask_type="causal", qkv_format=qkv_format)
    angles = RotaryPositionEmbedding(HIDDEN // HEADS).to(device)(LENGTH)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    module_inputs = swapped(x, qkv_format).to(device)
    out = module(module_inputs, rotary_pos_emb=(angles, angles) if pair else angles)
    seen = attention_reference.seen_keys("causal", None, LENGTH, LENGTH, [(0, 0)] * BATCH)
    expected, _ = reference.multi_head(
        reference.parameters_of(module),
        x.double(),
        seen,
        heads_of(module),
        Norm(),
        angles=angles[:, 0, 0].cpu(),
    )
    assert relative_error(swapped(out, qkv_format), expected) < bound_of(torch.float32, device)


def test_packed_sequences_are_rows_of_a_batch(device):
    """With RoPE and a mask, results in thd equal those of the padded sequences."""
    module = make(device, qkv_format="bshd", attn_mask_type="padding_causal")
    angles = RotaryPositionEmbedding(HIDDEN // HEADS).to(device)(LENGTH)
    x = torch.randn(2, LENGTH, HIDDEN, device=device)
    ends = torch.tensor([0, 4, 4 + LENGTH], dtype=torch.int32, device=device)
    arguments = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "rotary_pos_emb": angles}
    padded = module(x, **arguments)
    packed = make(device, qkv_format="thd", attn_mask_type="padding_causal")
    packed.load_state_dict(module.state_dict())
    out = packed(torch.cat((x[0, :4], x[1])), max_seqlen_q=6, max_seqlen_kv=6, **arguments)
    assert_near(out, torch.cat((padded[0, :4], padded[1])), device)


def test_arguments_reach_the_core(device):
    module = make(device, fuse_qkv_params=True)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    hidden = torch.rand(BATCH, 1, LENGTH, LENGTH, device=device) < 0.3
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device)
    out = module(
        x,
        hidden,
        attn_mask_type="arbitrary",
        window_size=(2, 2),
        core_attention_bias_type="post_scale_bias",
        core_attention_bias=bias,
        checkpoint_core_attention=True,
    )
    seen = attention_reference.seen_keys(
        "arbitrary", (2, 2), LENGTH, LENGTH, [(0, 0)] * BATCH, hidden.cpu()
    )
    expected, _ = reference.multi_head(
        reference.parameters_of(module),
        x.transpose(0, 1).cpu().double(),
        seen,
        heads_of(module),
        Norm(),
        post_bias=bias.cpu(),
    )
    assert relative_error(out.transpose(0, 1), expected) < bound_of(torch.float32, device)


def test_frozen_cross_attention_of_what_needs_no_gradient(device):
    """If nothing needs gradients of the key-value projection, the backward leaves it out."""
    module = make(device, attention_type="cross").requires_grad_(False)
    x, memory = (torch.randn(LENGTH, BATCH, HIDDEN, device=device) for _ in range(2))
    gradients = []
    for needs in (False, True):
        x = x.detach().requires_grad_()
        module(x, encoder_output=memory.clone().requires_grad_(needs)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("cross", [False, True])
def test_what_is_returned(device, cross):
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    memory = x[:3] if cross else None
    changes = {"attention_type": "cross" if cross else "self", "input_layernorm": True}
    module = make(device, **changes)
    plain = module(x, encoder_output=memory)
    state = module.state_dict()

    def run(**more):
        other = make(device, **changes, **more)
        other.load_state_dict(state)
        return other(x, encoder_output=memory)

    out, bias = run(return_bias=True)
    assert_near(out + bias, plain, device)
    out, tap = run(return_layernorm_output=True)
    assert torch.equal(out, plain)
    norm = module.layernorm_query if cross else module.layernorm_qkv
    expected = torch.nn.functional.layer_norm(
        x, (HIDDEN,), norm.layer_norm_weight, norm.layer_norm_bias, 1e-5
    )
    assert_near(tap, expected, device)
    out, bias, tap = run(return_bias=True, return_layernorm_output=True)
    assert bias.shape == (HIDDEN,)
    assert tap.shape == x.shape


def test_returned_bias_is_none_without_bias():
    _, bias = make(bias=False, return_bias=True)(torch.randn(LENGTH, BATCH, HIDDEN))
    assert bias is None


def test_shapes_of_parameters():
    module = make(num_gqa_groups=2, kv_channels=16, fuse_qkv_params=True)
    assert module.qkv.weight.shape == ((4 + 2 * 2) * 16, HIDDEN)
    assert module.proj.weight.shape == (HIDDEN, 4 * 16)
    split = make(num_gqa_groups=2, kv_channels=16).qkv
    shapes = [tuple(p.shape) for name, p in split.named_parameters() if name.endswith("weight")]
    assert shapes == [(64, HIDDEN), (32, HIDDEN), (32, HIDDEN)]


def test_queries_keys_and_values_are_views():
    """Nothing is copied between the projection and the core."""
    for case in ({}, {"fuse_qkv_params": True}, {"num_gqa_groups": 2}):
        module = make(**case)
        seen = {}
        module.qkv.register_forward_hook(lambda _m, _i, out, seen=seen: seen.update(qkv=out))
        module.core_attention.register_forward_pre_hook(
            lambda _m, args, seen=seen: seen.update(args=args)
        )
        module(torch.randn(LENGTH, BATCH, HIDDEN))
        storage = seen["qkv"].untyped_storage().data_ptr()
        assert all(x.untyped_storage().data_ptr() == storage for x in seen["args"][:3])


def test_names_of_children():
    module = make(name="decoder.1.self_attention", input_layernorm=True)
    assert module.layernorm_qkv.name == "decoder.1.self_attention.layernorm_qkv"
    assert module.proj.name == "decoder.1.self_attention.proj"
    cross = make(name="x", attention_type="cross", input_layernorm=True)
    assert cross.layernorm_query.name == "x.layernorm_query"
    assert cross.key_value.name == "x.key_value"


def test_groups_of_one_rank_are_accepted():
    module = make(set_parallel_mode=True, sequence_parallel=True, tp_size=1, tp_group=None)
    module.set_tensor_parallel_group(None)
    module.set_context_parallel_group(None, [0], None)
    module(torch.randn(LENGTH, BATCH, HIDDEN))


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "32 is not divisible by 5", {"num_attention_heads": 5}),
        (ValueError, "4 is not divisible by 3", {"num_gqa_groups": 3}),
        (ValueError, "layer_number >= 1, got 0", {"layer_number": 0}),
        (ValueError, "attention_type 'self' or 'cross', got 'own'", {"attention_type": "own"}),
        (ValueError, "fuse_qkv_params=True with", {"fuse_wgrad_accumulation": True}),
        (
            ValueError,
            "num_gqa_groups divisible by tp_size=4, got 2",
            {"num_gqa_groups": 2, "tp_size": 4, "set_parallel_mode": True},
        ),
        (TypeError, "unexpected keyword argument.*qkv_fmt", {"qkv_fmt": "sbhd"}),
    ],
)
def test_bad_constructor_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        MultiheadAttention(**{"hidden_size": 32, "num_attention_heads": 4, **arguments})


def test_bad_inputs():
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    with pytest.raises(ValueError, match="expected encoder_output with attention_type 'cross'"):
        make(attention_type="cross")(x)
    with pytest.raises(TypeError, match="inference_params of InferenceParams, got object"):
        make()(x, inference_params=object())
    with pytest.raises(TypeError, match=r"attention_mask of dtype torch\.bool"):
        make(attn_mask_type="padding")(x, torch.zeros(BATCH, 1, 1, LENGTH))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rotary_angles_are_one_or_two(count):
    module = make("cpu", name="attention")
    angles = RotaryPositionEmbedding(HIDDEN // HEADS).to("cpu")(LENGTH)
    text = rf"rotary_pos_emb to be a tensor or a pair .*, got {count} entries \(layer attention\)"
    with pytest.raises(ValueError, match=text):
        module(torch.randn(LENGTH, BATCH, HIDDEN), rotary_pos_emb=(angles,) * count)
    with pytest.raises(TypeError, match=r"pair of tensors, got list \(layer attention\)"):
        module(torch.randn(LENGTH, BATCH, HIDDEN), rotary_pos_emb=(angles, [angles]))


@pytest.mark.parametrize("host_bound", [0, 1 << 40])
def test_packed_sequences_need_angles_for_the_longest(monkeypatch, host_bound):
    monkeypatch.setattr(capture, "HOST_BOUND_BYTES", host_bound)
    types = {"qkv_format": "thd", "attn_mask_type": "padding"}
    module = make("cpu", fuse_qkv_params=True, name="attention", **types)
    x, angles = torch.randn(9, HIDDEN), RotaryPositionEmbedding(HIDDEN // HEADS)(4)
    ends, starts = [torch.tensor(e, dtype=torch.int32) for e in ([0, 3, 7], [0, 3, 9])]
    packed = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    padded = {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    module(x, rotary_pos_emb=angles, **packed, **padded)
    for short in (angles[:3], (angles[:3], angles)):
        for places in ({}, padded):
            with pytest.raises(ValueError, match=r"4 positions, .* got 3 \(layer attention\)"):
                module(x, rotary_pos_emb=short, **packed, **places)


@pytest.mark.parametrize("groups", [4, 2])
def test_a_backward_in_torch_autocast_computes_in_the_dtype_of_the_forward(device, groups):
    module = make(device, num_gqa_groups=groups, softmax_type="learnable")
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    found = []
    for enabled in (False, True):
        x = x.detach().requires_grad_()
        out = module(x)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out)))
    for gradient, expected in zip(*found, strict=True):
        assert torch.equal(gradient, expected)
