"""`get_attention_backend` asks `attention_backends`, and answers in terms of NVIDIA's package."""

import functools

import pytest
import torch
from torch.torch_version import TorchVersion

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.attention import BackendTable, attention_params
from transformer_engine.pytorch.attention.backends import BACKENDS, flash2, flash4
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    get_attention_backend,
)
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

ARBITRARY = FusedAttnBackend["F16_arbitrary_seqlen"]
FUSED = (False, None, True, ARBITRARY, False, [False, True, True])
UNFUSED = (False, None, False, None, True, [False, False, True])
NOTHING = (False, None, False, None, False, [False, False, False])
DPA = DelayedScaling(fp8_dpa=True)
CODES = {"qkv_dtype": torch.float8_e4m3fn}


@pytest.fixture
def on_cpu(monkeypatch):
    asked = functools.partial(te.attention_backends, device="cpu")
    monkeypatch.setattr(attention_params, "attention_backends", asked)


@pytest.fixture
def asked(monkeypatch):
    """The keywords of the last question; the answer is that all backends of `taking` could run."""

    class Asked(dict):
        taking = ("unfused",)

        def __call__(self, **keywords):
            self.update(keywords)
            names = [backend.name for backend in BACKENDS if backend.name not in self.taking]
            return BackendTable({**dict.fromkeys(self.taking), **dict.fromkeys(names, "no")})

    monkeypatch.setattr(attention_params, "attention_backends", found := Asked())
    return found


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({}, FUSED),
        ({"core_attention_bias_type": "post_scale_bias"}, UNFUSED),
        ({"attention_dropout": 1.0}, UNFUSED),
        ({"attention_dropout": 1.0, "is_training": False}, FUSED),
        ({"softmax_type": "learnable"}, UNFUSED),
        ({"max_seqlen_q": 0}, UNFUSED),
        ({"context_parallel": True, "head_dim_v": 32}, UNFUSED),
        ({"context_parallel": True, "head_dim_v": 32, "cp_comm_type": "a2a"}, FUSED),
        ({"cp_comm_type": "p2p", "head_dim_v": 32}, FUSED),
        ({"fp8": True}, UNFUSED),
        ({"fp8": True, "fp8_meta": {"recipe": DPA}}, UNFUSED),
        ({"fp8": False, "fp8_meta": {"recipe": DPA}}, FUSED),
        ({"fp8": True, "fp8_meta": {"recipe": DelayedScaling()}}, FUSED),
        ({"fp8": True, "fp8_meta": {"recipe": DelayedScaling()}, **CODES}, FUSED),
        ({"fp8": True, "fp8_meta": {"recipe": Float8CurrentScaling(fp8_dpa=True)}}, NOTHING),
    ],
)
def test_answers_on_a_cpu(on_cpu, fields, answer):
    assert get_attention_backend(AttentionParams(**fields)) == answer


@pytest.mark.parametrize(
    ("off", "answer"),
    [
        # sdpa runs if either of the first two is on
        (("NVTE_FUSED_ATTN",), (True, None, False, None, False, [True, False, True])),
        (("NVTE_FLASH_ATTN",), FUSED),
        (("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN"), UNFUSED),
        (("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"), NOTHING),
    ],
    ids=str,
)
def test_environment(on_cpu, monkeypatch, off, answer):
    for name in off:
        monkeypatch.setenv(name, "0")
    assert get_attention_backend(AttentionParams()) == answer


@pytest.mark.parametrize(
    ("taking", "answer"),
    [
        (("flash4", "cudnn"), (True, "4.0", False, ARBITRARY, False, [True, True, False])),
        (("cudnn", "flash2"), (False, "2.8", True, ARBITRARY, False, [True, True, False])),
        (("flash2", "flash4"), (True, "2.8", False, None, False, [True, False, False])),
        (("cudnn_fp8", "unfused"), (False, None, True, 2, False, [False, True, True])),
    ],
)
def test_kinds_of_backends(asked, monkeypatch, taking, answer):
    monkeypatch.setattr(flash4.SOURCE, "version", TorchVersion("4.0"))
    monkeypatch.setattr(flash2.SOURCE, "version", TorchVersion("2.8"))
    asked.taking = taking
    assert get_attention_backend(AttentionParams()) == answer


BIAS = {"core_attention_bias_type": "post_scale_bias"}
SIZES = {"batch_size": 2, "num_heads": 4, "max_seqlen_q": 5, "max_seqlen_kv": 6}


@pytest.mark.parametrize(
    ("fields", "keywords"),
    [
        ({"qkv_dtype": torch.float16}, {"dtype": torch.float16}),
        ({"fp8": True, **CODES}, {"dtype": torch.bfloat16, "fp8": True}),
        *[
            ({"qkv_layout": layout}, {"qkv_format": qkv_format, "batch_size": batch})
            for layout, qkv_format, batch in (
                ("bs3hd", "bshd", 1),
                ("sbhd_sbh2d", "sbhd", 1),
                ("thd_thd_thd", "thd", None),
                ("paged_kv_sbhd_bshd_bshd", "sbhd", 1),
            )
        ],
        ({"batch_size": 3}, {"batch_size": 3}),
        ({"num_heads": 8}, {"num_attention_heads": 8}),
        ({"num_gqa_groups": 2}, {"num_gqa_groups": 2}),
        ({"max_seqlen_q": 7}, {"max_seqlen_q": 7}),
        ({"max_seqlen_kv": 7}, {"max_seqlen_kv": 7}),
        ({"head_dim_qk": 32}, {"kv_channels": (32, 64)}),
        ({"head_dim_v": 32}, {"kv_channels": (64, 32)}),
        ({"attn_mask_type": "causal"}, {"attn_mask_type": "causal"}),
        ({"window_size": (3, 0)}, {"window_size": (3, 0)}),
        ({"bottom_right_diagonal": False}, {"bottom_right_diagonal": False}),
        ({"alibi_slopes_shape": [16]}, {"alibi_slopes": True}),
        ({"core_attention_bias_type": "alibi"}, {"core_attention_bias_type": "alibi"}),
        *[
            ({"core_attention_bias_shape": name, **BIAS, **SIZES}, {"core_attention_bias_shape": x})
            for name, x in {
                "1hss": (1, 4, 5, 6),
                "b1ss": (2, 1, 5, 6),
                "bhss": (2, 4, 5, 6),
                "11ss": (1, 1, 5, 6),
                "111s": (1, 1, 1, 6),
                (1, 1, 5, 6): (1, 1, 5, 6),
                None: None,
            }.items()
        ],
        (
            {"core_attention_bias_shape": "bhss"},
            {"core_attention_bias_shape": None, "core_attention_bias_requires_grad": False},
        ),
        (BIAS, {"core_attention_bias_requires_grad": True}),
        (
            {**BIAS, "core_attention_bias_requires_grad": False},
            {"core_attention_bias_requires_grad": False},
        ),
        ({"attention_dropout": 0.1}, {"attention_dropout": 0.1}),
        ({"context_parallel": True}, {"cp_comm_type": "p2p"}),
        ({"context_parallel": True, "cp_comm_type": "a2a"}, {"cp_comm_type": "a2a"}),
        ({"deterministic": True}, {"deterministic": True}),
        ({"is_training": False}, {"is_training": False}),
        ({"softmax_type": "learnable"}, {"softmax_type": "learnable"}),
    ],
)
def test_fields_become_keywords(asked, fields, keywords):
    usual = {
        "bottom_right_diagonal": True,
        "cp_comm_type": None,
        "deterministic": None,
        "is_training": True,
        "kv_channels": (64, 64),
    }
    get_attention_backend(AttentionParams(**fields))
    expected = {**usual, **keywords}
    assert {name: asked[name] for name in expected} == expected


@pytest.mark.parametrize(
    "field",
    [
        {"pad_between_seqs": True},
        {"cp_size": 2},
        {"return_max_logit": True},
        {"cuda_graph": True},
        {"num_splits": 2},
        {"checkpoint_core_attention": True},
    ],
    ids=str,
)
def test_fields_without_effect(asked, field):
    get_attention_backend(AttentionParams())
    usual = dict(asked)
    get_attention_backend(AttentionParams(**field))
    assert dict(asked) == usual


def make_cache(kind):
    params = te.InferenceParams(2, 16)
    if kind == "fixed":
        params.sequence_len_offset = torch.zeros(1, dtype=torch.int64)
    return params


@pytest.mark.parametrize(
    ("kind", "queries", "asks"),
    [
        ("appended", 4, "causal_bottom_right"),
        ("fixed", 4, "padding_causal_bottom_right"),
        ("fixed", 1, "padding"),
    ],
)
def test_caches_change_the_mask(asked, kind, queries, asks):
    fields = {
        "attn_mask_type": "causal",
        "max_seqlen_q": queries,
        "bottom_right_diagonal": False,
    }
    get_attention_backend(AttentionParams(**fields, inference_params=make_cache(kind)))
    assert (asked["inference_params"], asked["attn_mask_type"]) == (kind, asks)
    assert asked["bottom_right_diagonal"] is True


def test_a_cache_of_named_sequences_is_batch_first(asked):
    cache = te.InferenceParams(2, 16, 4, 8, dtype=torch.float32, is_paged=False)
    cache.cache_manager = object()
    fields = {"attn_mask_type": "padding_causal", "qkv_layout": "thd_bshd_bshd"}
    get_attention_backend(AttentionParams(**fields, inference_params=cache))
    assert (asked["inference_params"], asked["qkv_format"]) == ("named", "bshd")
    assert asked["attn_mask_type"] == "padding_causal_bottom_right"


@pytest.mark.parametrize(
    ("error", "message", "fields"),
    [
        (NotImplementedError, "fp8_output=False, the only .* got True", {"fp8_output": True}),
        (NotImplementedError, "has_score_mod=False", {"has_score_mod": True}),
        (NotImplementedError, "has_score_mod_bprop=False", {"has_score_mod_bprop": True}),
        (NotImplementedError, "qkv_type=.*Tensor", {"qkv_type": te.Float8Tensor}),
        (ValueError, "expected qkv_layout of the formats .* got 'bhsd'", {"qkv_layout": "bhsd"}),
        (ValueError, "111s}, got 'hhhh'", {"core_attention_bias_shape": "hhhh", **BIAS}),
        (TypeError, "expected qkv_layout to be a str, got None", {"qkv_layout": None}),
        (TypeError, "expected qkv_dtype torch.float32", CODES),
        (TypeError, "inference_params of InferenceParams, got int", {"inference_params": 3}),
    ],
)
def test_errors(error, message, fields):
    with pytest.raises(error, match=rf"^\[get_attention_backend\] .*{message}"):
        get_attention_backend(AttentionParams(**fields))


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("expected a padding mask type .* got 'no_mask'", {"qkv_layout": "t3hd"}),
        ("16 is not divisible by 5", {"num_gqa_groups": 5}),
        ("expected num_attention_heads >= 1, got 0", {"num_heads": 0, "num_gqa_groups": 1}),
        ("expected kv_channels >= 1, got -8", {"head_dim_v": -8}),
        ("a2a.p2p}, got 'ring'", {"context_parallel": True, "cp_comm_type": "ring"}),
    ],
)
def test_errors_are_those_of_attention(message, fields):
    with pytest.raises(ValueError, match=message):
        get_attention_backend(AttentionParams(**fields))
