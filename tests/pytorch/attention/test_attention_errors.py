"""DotProductAttention: state, choice of backend, and the arguments that it refuses."""

import re
from unittest import TestCase

import pytest
import torch
from cases.attention import cu_seqlens
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv

from transformer_engine.pytorch.attention import attention_backends
from transformer_engine.pytorch.attention.backends.backend import Problem
from transformer_engine.pytorch.attention.backends.dense import check_bias_shape
from transformer_engine.pytorch.attention.masks.masks import MaskRule, MaskType


def test_state_dict_has_one_empty_entry_and_any_checkpoint_loads():
    module = make_module()
    state = module.state_dict()
    assert list(state) == ["_extra_state"]
    assert state["_extra_state"].dtype is torch.uint8
    assert state["_extra_state"].numel() == 0
    for old in ({}, state, {"fused_attention._extra_state": None}, {"_extra_state": None}):
        outer = torch.nn.ModuleDict({"core_attention": module})
        outer.load_state_dict({f"core_attention.{key}": value for key, value in old.items()})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({"weight": torch.zeros(1)})


def test_backends_explain_themselves(monkeypatch):
    table = attention_backends(device="cpu")
    assert (table["sdpa"], table["unfused"], table.chosen) == (None, None, "sdpa")
    assert re.search(r"(?m)^  sdpa +runs$", str(table))
    assert re.search(r"(?m)^  unfused +could run too$", str(table))
    table = attention_backends(device="cpu", core_attention_bias_type="alibi")
    assert table.chosen == "unfused"
    assert "core_attention_bias_type='no_bias'" in table["sdpa"]
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    reason = attention_backends(device="cuda")["sdpa"]
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO" in reason
    assert attention_backends(device="cuda", deterministic=False)["sdpa"] is None
    assert attention_backends(device="cuda", is_training=False)["sdpa"] is None


def test_a_table_of_no_device():
    with pytest.raises(ValueError, match=r"^\[attention_backends\] expected device .*, got 'gpu'"):
        attention_backends(device="gpu")


def test_choice_and_table_agree(monkeypatch):
    """The debug log of a call contains the table for the same arguments."""
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    logger = ("DotProductAttention", "DEBUG")
    with TestCase().assertLogs(*logger) as logs:
        make_module(num_gqa_groups=2)(make_qkv()[0], *make_qkv(shape=(5, 2, 2, 8))[1:])
    text = "\n".join(logs.output)
    problem = "qkv_format='sbhd', .*batch=2, queries=5, keys=5, heads=4, groups=2, key_size=8"
    assert re.search(problem, text)
    assert "running with the backend sdpa" in text
    sizes = {"num_attention_heads": 4, "num_gqa_groups": 2, "kv_channels": 8, "batch_size": 2}
    said = attention_backends(device="cpu", max_seqlen_q=5, max_seqlen_kv=5, **sizes)
    assert str(said) in text
    monkeypatch.setenv("NVTE_DEBUG", "0")
    with TestCase().assertNoLogs(*logger):
        make_module(num_gqa_groups=1)(make_qkv()[0], *make_qkv(shape=(5, 2, 1, 8))[1:])


@pytest.mark.parametrize(
    "name", ["NVTE_FUSED_ATTN_USE_FAv2_BWD", "NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT"]
)
def test_variables_without_effect_are_announced_once(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=f"{name}.* changes nothing"):
        make_module()(*make_qkv())
    make_module()(*make_qkv(shape=(6, 2, 4, 8)))


def test_no_backend_left(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    message = (
        r"(?s)no dot product attention backend[^\n]*, alibi \(layer Layer_\d+\):\n"
        r".*sdpa +refuses: takes no bias.*NVTE_UNFUSED_ATTN=0"
    )
    with pytest.raises(ValueError, match=message):
        make_module()(*make_qkv(), core_attention_bias_type="alibi")
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")  # each call reads the variable
    make_module()(*make_qkv(), core_attention_bias_type="alibi")


def test_errors_name_the_mask_of_a_part_with_a_band():
    kind = MaskType(causal=True, bottom_right=True, arbitrary=True)
    rule = MaskRule(kind, left=-1, right=0, bottom_right=True)
    assert "any keys, arbitrary, no_bias" in Problem(rule=rule).summary


THD = {"qkv_format": "thd", "attn_mask_type": "padding"}
BIAS = torch.zeros(1, 4, 5, 5)
SLOPES = torch.ones(4)
PADDING = torch.zeros(2, 1, 1, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, r"expected qkv_format in \{sbhd, bshd, thd\}, got 'hd'", {"qkv_format": "hd"}),
        (ValueError, "expected attn_mask_type in", {"attn_mask_type": "upper"}),
        (ValueError, "expected window_size", {"window_size": (-3, 0)}),
        (ValueError, "attention_mask, or both cu_seqlens_q", {"attn_mask_type": "padding"}),
        (
            ValueError,
            "both cu_seqlens_q and cu_seqlens_kv, .* got cu_seqlens_q alone",
            {
                "attn_mask_type": "padding",
                "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
            },
        ),
        (
            ValueError,
            r"query padding mask in attention_mask of shape \(2, 1, 1, 5\), got \(2, 5\)",
            {
                "attn_mask_type": "padding",
                "attention_mask": torch.zeros(2, 5, dtype=torch.bool),
            },
        ),
        (
            ValueError,
            r"attention_mask that broadcasts to \(2, 4, 5, 5\) .* got \(3, 1, 5, 5\)",
            {
                "attn_mask_type": "arbitrary",
                "attention_mask": torch.zeros(3, 1, 5, 5, dtype=torch.bool),
            },
        ),
        (ValueError, "attention_mask for the mask type 'arb", {"attn_mask_type": "arbitrary"}),
        (
            TypeError,
            "attention_mask of dtype torch.bool",
            {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(5, 5)},
        ),
        (
            ValueError,
            r"cu_seqlens_kv of shape \(3,\), got \(2,\)",
            {
                "attn_mask_type": "padding",
                "cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32),
                "cu_seqlens_kv": torch.tensor([0, 5], dtype=torch.int32),
            },
        ),
        (ValueError, "core_attention_bias_type in", {"core_attention_bias_type": "bias"}),
        (ValueError, "core_attention_bias to be None .*'no_bias'", {"core_attention_bias": BIAS}),
        (
            ValueError,
            "core_attention_bias to be a tensor .*'post_scale_bias'",
            {"core_attention_bias_type": "post_scale_bias"},
        ),
        (
            ValueError,
            r"broadcasts to \(2, 4, 5, 5\).*got \(1, 4, 5, 4\)",
            {
                "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": BIAS[..., :4],
            },
        ),
        (ValueError, "alibi_slopes to be None", {"alibi_slopes": SLOPES}),
        (
            TypeError,
            "alibi_slopes of torch.float32, got torch.float16",
            {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES.half()},
        ),
        (
            ValueError,
            r"alibi_slopes of shape \(4,\) or \(2, 4\), got \(3,\)",
            {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES[:3]},
        ),
        (
            TypeError,
            "alibi_slopes to be a torch.Tensor, got list",
            {"core_attention_bias_type": "alibi", "alibi_slopes": [0.5] * 4},
        ),
        (
            TypeError,
            "core_attention_bias to be a tensor of floating point, got torch.bool",
            {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS.bool()},
        ),
        (
            ValueError,
            r"cu_seqlens_q of sequences of at most 5 tokens, got the lengths \[5, 7\]",
            {
                "attn_mask_type": "padding",
                "cu_seqlens_q": torch.tensor([0, 5, 12], dtype=torch.int32),
                "cu_seqlens_kv": torch.tensor([0, 5, 12], dtype=torch.int32),
            },
        ),
        *[
            (
                ValueError,
                rf"cu_seqlens_q to rise from 0, got \[{ends[0]}, ",
                {
                    "attn_mask_type": "padding",
                    "cu_seqlens_q": torch.tensor(ends, dtype=torch.int32),
                    "cu_seqlens_kv": torch.tensor([0, 5, 10], dtype=torch.int32),
                },
            )
            for ends in ([4, 4, 4], [1, 3, 4])
        ],
        *[
            (
                ValueError,
                f"one mask or a pair, .* got a tuple of {count} .layer",
                {"attn_mask_type": "padding", "attention_mask": (PADDING,) * count},
            )
            for count in (1, 3)
        ],
        (TypeError, "attn_mask_type to be a str", {"attn_mask_type": ("padding", "causal")}),
        (TypeError, "of InferenceParams, got object", {"inference_params": object()}),
    ],
)
def test_bad_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        make_module()(*make_qkv(), **arguments)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "not divisible by 3", {"num_gqa_groups": 3}),
        (ValueError, r"attention_dropout in \[0, 1\]", {"attention_dropout": 1.5}),
        (ValueError, "attention_type 'self' or 'cross'", {"attention_type": "both"}),
        (ValueError, "expected attn_mask_type in", {"attn_mask_type": "upper"}),
        (ValueError, "softmax_type in .vanilla, off-by-one, learn", {"softmax_type": "sink"}),
        (TypeError, "attn_mask_type to be a str, got None", {"attn_mask_type": None}),
        (ValueError, "softmax_scale > 0 and finite, got 0.0", {"softmax_scale": 0.0}),
        (ValueError, "softmax_scale > 0 and finite, got -1", {"softmax_scale": -1}),
        (ValueError, "softmax_scale > 0 and finite, got nan", {"softmax_scale": float("nan")}),
        (ValueError, r"of a key and a value, got \(8, 8, 8\)", {"kv_channels": (8, 8, 8)}),
        (ValueError, "num_attention_heads divisible by tp_size=3", {"tp_size": 3}),
    ],
)
def test_bad_constructor_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        make_module(**arguments)


@pytest.mark.parametrize("shape", [(5, 5), (4, 5, 5), (1, 1, 4, 5, 5), (3, 4, 5, 5)])
def test_shapes_of_a_bias_that_backends_refuse(shape):
    """A backend must get four dimensions, because cuDNN reads four. The first two broadcast."""
    check_bias_shape(BIAS, (2, 4, 5, 5))
    found = re.escape(f"got {shape}")
    with pytest.raises(ValueError, match=rf"core_attention_bias that broadcasts .*{found}"):
        check_bias_shape(torch.zeros(shape), (2, 4, 5, 5))


def test_bad_inputs():
    q, k, v = make_qkv()
    with pytest.raises(TypeError, match=r"one dtype, got torch.float32, torch.float16"):
        make_module()(q, k.half(), v)
    with pytest.raises(TypeError, match=r"expected query_layer of float32.*torch.float64"):
        make_module()(q.double(), k.double(), v.double())
    with pytest.raises(
        ValueError, match=r"query_layer \(sequence, batch, 4, 16\).*got \(5, 2, 4, 8"
    ):
        make_module(kv_channels=16)(q, k, v)
    with pytest.raises(ValueError, match=r"key_layer \(sequence, batch, 2, 8\)"):
        make_module(num_gqa_groups=2)(q, k, v)
    one = "DotProductAttention] expected key_layer and value_layer of one"
    with pytest.raises(ValueError, match=r"query_layer and key_layer of one batch .* 2 and 1"):
        make_module()(q, k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match=f"{one} batch size, got 2 and 1"):
        make_module()(q, k, v[:, :1])
    with pytest.raises(ValueError, match=f"{one} length, got 4 and 3"):
        make_module()(q, k[:4], v[:3])


def test_bad_packed_inputs():
    q, k, v = make_qkv(shape=(8, 4, 8))
    ends = cu_seqlens([3, 5], "cpu")
    with pytest.raises(ValueError, match=r"expected a padding mask type .* 'thd'"):
        make_module(qkv_format="thd")(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    with pytest.raises(ValueError, match="expected cu_seqlens_q for qkv_format 'thd', got None"):
        make_module(**THD)(q, k, v)
    with pytest.raises(TypeError, match=r"cu_seqlens_q to be a torch.Tensor, got list"):
        make_module(**THD)(q, k, v, cu_seqlens_q=[0, 3, 8], cu_seqlens_kv=ends)
    with pytest.raises(TypeError, match=r"cu_seqlens_q of torch.int32, got torch.int64"):
        make_module(**THD)(q, k, v, cu_seqlens_q=ends.long(), cu_seqlens_kv=ends)
    with pytest.raises(ValueError, match="of equal shape"):
        make_module(**THD)(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends[:2])


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "max_seqlen_q of at least 5, .* got 4", {"max_seqlen_q": 4}),
        (ValueError, "max_seqlen_kv of at least 5, .* got 1", {"max_seqlen_kv": 1}),
        (TypeError, "max_seqlen_q to be an int, got 5.0", {"max_seqlen_q": 5.0}),
        (ValueError, r"cu_seqlens_q_padded of shape \(3,\), as", {"cu_seqlens_q_padded": [0, 8]}),
        (
            ValueError,
            r"cu_seqlens_q_padded to leave room for the lengths \[3, 5\] .* got \[0, 2, 8\]",
            {"cu_seqlens_q_padded": [0, 2, 8]},
        ),
        (
            ValueError,
            r"cu_seqlens_kv_padded to leave room .* within 8 tokens, got \[0, 4, 8\]",
            {"cu_seqlens_kv_padded": [0, 4, 8]},
        ),
    ],
)
def test_bad_places_of_packed_sequences(error, message, arguments):
    ends = cu_seqlens([3, 5], "cpu")
    arguments = {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        make_module(**THD)(
            *make_qkv(shape=(8, 4, 8)),
            **{"cu_seqlens_q": ends, "cu_seqlens_kv": ends.clone(), **arguments},
        )


def test_a_bias_may_leave_out_leading_dimensions():
    whole = torch.randn(1, 1, 5, 5, requires_grad=True)
    flat = whole.detach()[0, 0].requires_grad_()
    q, k, v = make_qkv()
    for bias in (whole, flat):
        out = make_module()(
            q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias
        )
        out.square().sum().backward()
    assert torch.equal(flat.grad, whole.grad[0, 0])
