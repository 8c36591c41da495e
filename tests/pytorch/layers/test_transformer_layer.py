"""TransformerLayer against the definition; data flow, dropout, drop path, names, errors."""

import attention_reference
import layer_reference as reference
import pytest
import torch
from graph_helpers import captured
from layer_reference import (
    Heads,
    Layer,
    Norm,
    assert_near,
    assert_same_gradients,
    bound_of,
    relative_error,
)

from transformer_engine.pytorch.attention import MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding
from transformer_engine.pytorch.layers.transformer_layer import TransformerLayer

BATCH, LENGTH, HIDDEN, FFN, HEADS = 2, 6, 32, 48, 4

CASES = {
    "default": {},
    "bshd": {"attn_input_format": "bshd", "self_attn_mask_type": "no_mask"},
    "fused-groups": {"fuse_qkv_params": True, "num_gqa_groups": 2},
    "flat": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "llama": {
        "bias": False,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "num_gqa_groups": 1,
        "zero_centered_gamma": True,
    },
    "bf16": {"params_dtype": torch.bfloat16, "activation": "relu"},
    "post-norm-residual": {"apply_residual_connection_post_layernorm": True},
    "output-norm": {"output_layernorm": True, "activation": "squared_relu"},
    "output-rms-norm": {"output_layernorm": True, "normalization": "RMSNorm", "bias": False},
    "parallel": {"parallel_attention_mlp": True, "attn_input_format": "bshd"},
    "parallel-without-bias": {"parallel_attention_mlp": True, "bias": False},
    "decoder": {"layer_type": "decoder"},
    "decoder-post-norm-residual": {
        "layer_type": "decoder",
        "apply_residual_connection_post_layernorm": True,
        "fuse_qkv_params": True,
        "attn_input_format": "bshd",
    },
}


def make(device="cpu", **changes):
    arguments = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "device": device, **changes}
    layer = TransformerLayer(HIDDEN, FFN, HEADS, **arguments)
    with torch.no_grad():  # so that biases and norms change the output
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "norm_" not in name:
                parameter.mul_(6)
    return layer


def described(case):
    return Layer(
        Heads(
            HEADS,
            case.get("num_gqa_groups", HEADS),
            HIDDEN // HEADS,
            case.get("fuse_qkv_params", False) and case.get("qkv_weight_interleaved", True),
        ),
        Norm(case.get("normalization", "LayerNorm"), case.get("zero_centered_gamma", False)),
        case.get("activation", "gelu"),
        case.get("apply_residual_connection_post_layernorm", False),
        case.get("parallel_attention_mlp", False),
    )


def seen_of(mask_type="causal", queries=LENGTH, keys=LENGTH):
    return attention_reference.seen_keys(mask_type, None, queries, keys, [(0, 0)] * BATCH)


def swapped(x, case):
    """Convert from batch first to the case's format, or back."""
    return x if case.get("attn_input_format") == "bshd" else x.transpose(0, 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_definition(device, case):
    layer = make(device, **case)
    dtype = case.get("params_dtype", torch.float32)
    inputs = [torch.randn(BATCH, LENGTH, HIDDEN).to(dtype)]
    cross = {}
    if case.get("layer_type") == "decoder":
        inputs.append(torch.randn(BATCH, 9, HIDDEN).to(dtype))
        cross = {"cross_seen": seen_of("no_mask", keys=9)}
    exact = [x.double().requires_grad_() for x in inputs]
    module_inputs = [swapped(x, case).to(device).requires_grad_() for x in inputs]
    out = layer(module_inputs[0], encoder_output=module_inputs[1] if cross else None)
    parameters = reference.parameters_of(layer)
    expected = reference.transformer_layer(
        parameters,
        exact[0],
        described(case),
        seen_of(case.get("self_attn_mask_type", "causal")),
        exact[1] if cross else None,
        **cross,
    )
    assert out.dtype is dtype
    assert out.shape == module_inputs[0].shape
    assert relative_error(swapped(out, case), expected) < bound_of(dtype, device)
    upstream = torch.randn(expected.shape).to(dtype)
    expected.backward(upstream.double())
    swapped(out, case).backward(upstream.to(device))
    for a, b in zip(module_inputs, exact, strict=True):
        assert relative_error(swapped(a.grad, case), b.grad) < 2 * bound_of(dtype, device)
    assert_same_gradients(layer, parameters, 2 * bound_of(dtype, device))


def test_positions_and_biases_reach_attention(device):
    layer = make(device, attn_input_format="bshd")
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    angles = RotaryPositionEmbedding(HIDDEN // HEADS).to(device)(LENGTH)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH)
    out = layer(
        x.to(device),
        self_attn_mask_type="no_mask",
        window_size=(1, 1),
        rotary_pos_emb=angles,
        core_attention_bias_type="post_scale_bias",
        core_attention_bias=bias.to(device),
        checkpoint_core_attention=True,
    )
    expected = reference.transformer_layer(
        reference.parameters_of(layer),
        x.double(),
        described({}),
        attention_reference.seen_keys("no_mask", (1, 1), LENGTH, LENGTH, [(0, 0)] * BATCH),
        angles=angles[:, 0, 0].cpu(),
        post_bias=bias,
    )
    assert relative_error(out, expected) < bound_of(torch.float32, device)


def test_cross_attention_masks(device):
    """A pair of masks is a padding mask, a single mask an arbitrary one; their results agree."""
    layer = make(device, layer_type="decoder", attn_input_format="bshd")
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    memory = torch.randn(BATCH, 9, HIDDEN)
    keys = torch.arange(9) >= torch.tensor([9, 4])[:, None]
    pair = (torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool), keys.view(BATCH, 1, 1, 9))
    one = keys.view(BATCH, 1, 1, 9).expand(BATCH, 1, LENGTH, 9)
    expected = reference.transformer_layer(
        reference.parameters_of(layer),
        x.double(),
        described({}),
        seen_of(),
        memory.double(),
        ~one,
    )
    module_inputs = (x.to(device), None, None, None, memory.to(device))
    by_pair = layer(*module_inputs, tuple(m.to(device) for m in pair))
    by_one = layer(*module_inputs, one.to(device))
    by_name = layer(*module_inputs, one.to(device), enc_dec_attn_mask_type="arbitrary")
    unmasked = layer(*module_inputs, one.to(device), enc_dec_attn_mask_type="no_mask")
    assert relative_error(by_pair, expected) < bound_of(torch.float32, device)
    assert relative_error(by_one, expected) < bound_of(torch.float32, device)
    assert torch.equal(by_name, by_one)
    assert relative_error(unmasked, expected) > 0.01


def test_formats_agree(device):
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    sbhd = make(device)
    bshd = make(device, attn_input_format="bshd")
    bshd.load_state_dict(sbhd.state_dict())
    assert_near(bshd(x.transpose(0, 1)).transpose(0, 1), sbhd(x), device)
    thd = make(device, attn_input_format="thd", self_attn_mask_type="padding_causal")
    thd.load_state_dict(sbhd.state_dict())
    ends = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * LENGTH
    packed = thd(x.transpose(0, 1).flatten(0, 1), cu_seqlens_q=ends, cu_seqlens_kv=ends)
    assert_near(packed.view(BATCH, LENGTH, HIDDEN), sbhd(x).transpose(0, 1), device)


@pytest.mark.parametrize("training", [True, False])
def test_the_residual_has_the_dtype_of_autocast(device, training):
    layer = make(device).train(training)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = layer(x)
        assert torch.equal(out, layer(x.detach().bfloat16())), "cast once, at the beginning"
    assert out.dtype is torch.bfloat16
    assert relative_error(out, layer(x)) < bound_of(torch.bfloat16, device)
    out.sum().backward()
    assert x.grad.dtype is torch.float32
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def test_no_tokens(device):
    layer = make(device)
    x = torch.randn(0, BATCH, HIDDEN, device=device, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert all(int(p.grad.count_nonzero()) == 0 for p in layer.parameters())


def test_hidden_dropout_follows_the_generator_and_the_mode(device):
    layer = make(device, hidden_dropout=0.5)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(layer(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("case", [{}, {"attn_input_format": "bshd"}], ids=["sbhd", "bshd"])
def test_drop_path_in_the_layer(device, case):
    """A sample is left out of a branch as a whole, whichever dimension it is."""
    layer = make(device, drop_path_rate=0.9, **case)
    x = torch.randn(64, 3, HIDDEN, device=device)  # batch first
    out = swapped(layer(swapped(x, case).contiguous()), case)
    untouched = (out == x).flatten(1)
    assert bool(untouched.any()), "both branches of some sample are dropped"
    assert torch.equal(untouched.all(1), untouched.any(1))


def test_every_path_is_dropped(device):
    """At rate 1 the branches are zero, and so are the gradients of their parameters."""
    layer = make(device, drop_path_rate=1.0)
    x = torch.randn(LENGTH, BATCH, HIDDEN, device=device, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not any(p.grad.any() for p in layer.parameters())


def test_names_of_children():
    layer = make(name="decoder.7", layer_type="decoder")
    assert layer.self_attention.layernorm_qkv.name == "decoder.7.self_attention.layernorm_qkv"
    assert layer.inter_attention.proj.name == "decoder.7.inter_attention.proj"
    assert layer.layernorm_mlp.name == "decoder.7.layernorm_mlp"


def test_meta_device_and_reset():
    layer = TransformerLayer(HIDDEN, FFN, HEADS, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    for child in layer.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    assert not any(p.is_meta for p in layer.parameters())
    device = next(layer.parameters()).device
    assert torch.isfinite(layer(torch.randn(LENGTH, BATCH, HIDDEN, device=device))).all()


def test_groups_of_one_rank_are_accepted():
    layer = make(set_parallel_mode=True, sequence_parallel=True, output_layernorm=True)
    layer.set_tensor_parallel_group(None)
    layer.set_context_parallel_group(None, [0], None)
    layer(torch.randn(LENGTH, BATCH, HIDDEN))


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "layer_type 'encoder' or 'decoder', got 'both'", {"layer_type": "both"}),
        (ValueError, "self_attn_mask_type in", {"self_attn_mask_type": "upper"}),
        (ValueError, "enc_dec_attn_mask_type in", {"enc_dec_attn_mask_type": "upper"}),
        (ValueError, "attn_input_format in", {"attn_input_format": "bhsd"}),
        (ValueError, "0 <= hidden_dropout < 1, got 1", {"hidden_dropout": 1.0}),
        (ValueError, "0 <= drop_path_rate <= 1, got 2", {"drop_path_rate": 2.0}),
        (ValueError, "fuse_qkv_params=True with", {"fuse_wgrad_accumulation": True}),
        (
            ValueError,
            "parallel_attention_mlp=True without output_layernorm=True",
            {"parallel_attention_mlp": True, "output_layernorm": True},
        ),
        (
            ValueError,
            "without apply_residual_connection_post_layernorm=True",
            {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
        ),
        (
            ValueError,
            "without layer_type='decoder'",
            {"parallel_attention_mlp": True, "layer_type": "decoder"},
        ),
        (
            ValueError,
            "num_attention_heads divisible by tp_size=3, got 4",
            {"tp_size": 3, "set_parallel_mode": True},
        ),
        (ValueError, "tp_size >= 1, got 0", {"tp_size": 0}),
        (TypeError, "unexpected keyword argument.*hidden_dropuot", {"hidden_dropuot": 0.1}),
    ],
)
def test_bad_constructor_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        TransformerLayer(HIDDEN, FFN, HEADS, **arguments)


@pytest.mark.parametrize("kind", [TransformerLayer, MultiheadAttention])
@pytest.mark.parametrize(
    ("keyword", "near"),
    [
        ("windowsize", "window_size"),
        ("attention_masks", "attention_mask"),
        ("inference_param", "inference_params"),
        ("qkv_format", ""),
    ],
)
def test_keywords_of_a_call_that_nothing_takes(kind, keyword, near):
    hint = rf" \(did you mean {near}\?\)" if near else "$"
    text = rf"{kind.__name__}.forward\(\) got unexpected keyword argument\(s\) {keyword}{hint}"
    layer = make() if kind is TransformerLayer else MultiheadAttention(HIDDEN, HEADS, device="cpu")
    with pytest.raises(TypeError, match=text):
        layer(torch.randn(LENGTH, BATCH, HIDDEN), **{keyword: None})


def test_bad_inputs():
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH)
    with pytest.raises(ValueError, match=r"\(sequence, batch, 32\), got \(6, 2, 16\)"):
        make()(x[..., :16])
    with pytest.raises(TypeError, match=r"attention_mask of dtype torch\.bool"):
        make()(x, mask, "arbitrary")
    with pytest.raises(TypeError, match=r"enc_dec_attn_mask of dtype torch\.bool"):
        make(layer_type="decoder")(x, encoder_output=x, enc_dec_attn_mask=mask)
    with pytest.raises(ValueError, match=r"self_attn_mask_type in .*'upper'"):
        make()(x, self_attn_mask_type="upper")
    with pytest.raises(ValueError, match="expected encoder_output"):
        make(layer_type="decoder")(x)
    with pytest.raises(TypeError, match=r"expected attention_mask to be a tensor or .* got str"):
        make()(x, "causal")
    with pytest.raises(ValueError, match="of sequence length 8, got 6"):
        make(sequence_parallel=True, seq_length=8)(x)
    with pytest.raises(TypeError, match="inference_params of InferenceParams, got object"):
        make()(x, inference_params=object())


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Replays draw new dropout masks. Without dropout the results equal those of eager mode."""
    layer = make("cuda", params_dtype=torch.bfloat16)
    x = torch.randn(64, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        out = layer(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    for p in (0.0, 0.5):
        layer.hidden_dropout = p
        graph, found = captured(step)
        graph.replay()
        first = [t.clone() for t in found]
        if p == 0.0:
            for a, b in zip(first, step(), strict=True):
                assert relative_error(a, b) < 1e-2
        graph.replay()
        assert torch.equal(first[0], found[0]) == (p == 0.0)
