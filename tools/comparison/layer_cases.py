"""Cases of MultiheadAttention and TransformerLayer: arguments, formats, masks, positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import transformer_engine.pytorch as te
from comparison.attention_cases import padding_of, shorter
from comparison.bench import FEW_RECIPES, PRECISIONS, Bench, Case, Row, pairwise
from comparison.training import Arguments, Subject, train

HEADS = 4
KEYS = 19  # length of the encoder output that a decoder attends to
Options = dict[str, Any]
Factors = dict[str, tuple[str, ...]]


class Sizes(NamedTuple):
    """The sizes of a batch and of the layer."""

    length: int
    batch: int
    hidden: int = 128
    ffn: int = 192


TOKENS = {"32x2 tokens": Sizes(32, 2), "13x3 tokens": Sizes(13, 3), "64x1 tokens": Sizes(64, 1)}
SIZES: dict[str, int | None] = {"heads of 32": None, "heads of 64": 64, "heads of 24": 24}
FUSED: Options = {"fuse_qkv_params": True}
FLAT: Options = {**FUSED, "qkv_weight_interleaved": False}
RMS: Options = {"normalization": "RMSNorm"}
# Options of both classes. A key that begins with ">" is for the call, see `Layer.of_call`.
SHARED: dict[str, Options] = {
    "plain": {},
    "fused qkv": FUSED,
    "flat qkv": FLAT,
    "groups": {"num_gqa_groups": 2},
    "fused groups": {**FUSED, "num_gqa_groups": 2},
    "flat group": {**FLAT, "num_gqa_groups": 1},
    "no bias": {"bias": False},
    "attention dropout": {"attention_dropout": 0.2},
    "layer number": {"layer_number": 3},
    "no_mask": {">mask": "no_mask"},
    "bottom right": {">mask": "causal_bottom_right"},
    "window": {"window_size": (5, 0)},
    "window to both sides": {">mask": "no_mask", "window_size": (5, 3), **FUSED},
    "arbitrary": {">mask": "arbitrary"},
    "padding": {">mask": "padding"},
    "padding_causal": {">mask": "padding_causal", **FUSED},
    "padding by lengths": {">mask": "padding", ">lengths": True},
    "padding_causal by lengths": {">mask": "padding_causal", ">lengths": True},
    "thd": {">mask": "padding_causal", ">packed": True},
    "thd, groups": {">mask": "padding", ">packed": True, **FLAT, "num_gqa_groups": 2},
    "thd with gaps": {">mask": "padding_causal", ">packed": True, ">gaps": True, **FUSED},
    "thd, rope": {">mask": "padding_causal", ">packed": True, ">rope": 1.0},
    "rope": {">rope": 1.0},
    "rope, flat groups": {">rope": 1.0, **FLAT, "num_gqa_groups": 2},
    "rope, interleaved": {">rope": 1.0, "rotary_pos_interleaved": True, **FUSED},
    "rope, half": {">rope": 0.5},
    "rope of two": {">rope": 1.0, ">angles": "two", **FUSED},
    "post_scale_bias": {">bias": "post_scale_bias"},
    "pre_scale_bias": {">bias": "pre_scale_bias", ">mask": "no_mask"},
    "alibi": {">bias": "alibi"},
    "alibi of slopes": {">bias": "alibi", ">slopes": True, **FUSED},
    "core again": {">again": True},
    "core again, dropout": {">again": True, "attention_dropout": 0.2},
    "off-by-one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable", **FUSED},
    "norms of heads": {"qk_norm_type": "RMSNorm"},
    "norms of heads before rope": {
        "qk_norm_type": "LayerNorm",
        "qk_norm_before_rope": True,
        ">rope": 1.0,
    },
    "norms of heads after rope": {"qk_norm_type": "L2Normalization", ">rope": 1.0, **FUSED},
}
OF_ATTENTION: dict[str, Options] = {
    "norm": {"input_layernorm": True},
    "norm, fused": {"input_layernorm": True, **FUSED, **RMS},
    "norm output": {"input_layernorm": True, "return_layernorm_output": True},
    "return input": {"input_layernorm": True, "return_input": True, **FUSED},
    "return bias": {"return_bias": True},
    "norm, return bias": {"input_layernorm": True, "return_bias": True, **FUSED, **RMS},
    "cross": {"attention_type": "cross"},
    "cross, fused": {"attention_type": "cross", **FUSED},
    "cross, flat groups": {"attention_type": "cross", **FLAT, "num_gqa_groups": 2},
    "cross, norm": {"attention_type": "cross", "input_layernorm": True},
    "cross, norm, fused": {"attention_type": "cross", "input_layernorm": True, **FUSED},
    "cross, norms of heads": {"attention_type": "cross", "qk_norm_type": "RMSNorm"},
}
OF_LAYERS: dict[str, Options] = {
    "RMSNorm, swiglu": {**RMS, **FUSED, "activation": "swiglu", "bias": False},
    "llama": {**RMS, "activation": "swiglu", "bias": False, "num_gqa_groups": 2, ">rope": 1.0},
    "zero-centered RMSNorm": {**RMS, "zero_centered_gamma": True, "activation": "srelu"},
    "geglu": {"activation": "geglu", **FUSED},
    "parallel": {"parallel_attention_mlp": True},
    "parallel, fused, no bias": {"parallel_attention_mlp": True, **FUSED, "bias": False},
    "parallel, drops": {"parallel_attention_mlp": True, "hidden_dropout": 0.2},
    "norm at the end": {"output_layernorm": True},
    "RMSNorm at the end": {"output_layernorm": True, **RMS, **FUSED},
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
    "residual after RMSNorm": {"apply_residual_connection_post_layernorm": True, **RMS, **FUSED},
    "hidden dropout": {"hidden_dropout": 0.2, **FUSED},
    "both dropouts": {"hidden_dropout": 0.2, "attention_dropout": 0.1},
    "thd, drop path": {">mask": "padding_causal", ">packed": True, "drop_path_rate": 0.4},
    "drop path": {"drop_path_rate": 0.3},
    "drop path, dropout": {"drop_path_rate": 0.3, "hidden_dropout": 0.1, **FUSED},
    "decoder": {"layer_type": "decoder"},
    "decoder, fused groups": {"layer_type": "decoder", **FUSED, "num_gqa_groups": 2},
    "decoder, pair of masks": {"layer_type": "decoder", ">cross": "pair", **FUSED},
    "decoder, mask": {"layer_type": "decoder", ">cross": "one"},
    "decoder, causal": {"layer_type": "decoder", "enc_dec_attn_mask_type": "causal_bottom_right"},
    "decoder, residual after norm": {
        "layer_type": "decoder",
        "apply_residual_connection_post_layernorm": True,
    },
    "decoder, norm at the end": {"layer_type": "decoder", "output_layernorm": True, **RMS},
    "decoder, dropout": {"layer_type": "decoder", "hidden_dropout": 0.1, **FUSED},
}
ATTENTION_USES = (
    "plain",
    "microbatches",
    "main_grad",
    "fp8 weights",
    "frozen weights",
    "constant input",
    "checkpoint of te, not reentrant",
)
LAYER_USES = (
    *ATTENTION_USES,
    "calibrating",
    "narrow main_grad, microbatches",
    "fp8 weights, microbatches",
    "frozen biases",
    "frozen",
    "two backwards",
    "hooked",
    "copied",
    "reloaded",
    "accumulating",
    "checkpoint of te",
    "checkpoint of torch",
    "checkpoint of torch, not reentrant",
    "checkpoint of te, microbatches",
)


class Layer:
    """A layer with its options, and the arguments of its calls.

    Args:
        kind: `MultiheadAttention` or `TransformerLayer`.
        options: options of the constructor and, with ">" before the name, of the call.
        layout: `sbhd` or `bshd`.
        sizes: sizes of the batch and the layer.
        head: size of a head; None: the hidden size divided by the number of heads.
    """

    def __init__(
        self, kind: str, options: Options, layout: str, sizes: Sizes, head: int | None
    ) -> None:
        self.of_call = {name: x for name, x in options.items() if name.startswith(">")}
        packed = self.of_call.get(">packed", False)
        self.layout, self.sizes = "thd" if packed else layout, sizes
        self.whole = kind == "TransformerLayer"
        self.head = head or sizes.hidden // HEADS
        self.real = shorter(sizes.length, sizes.batch)
        own = {name: x for name, x in options.items() if not name.startswith(">")}
        mask = self.of_call.get(">mask", "causal")
        self.cross = "decoder" in own.values() or "cross" in own.values()
        if self.whole:
            self._options = {"self_attn_mask_type": mask, "attn_input_format": self.layout}
            self._options |= {"hidden_dropout": 0.0}
        else:
            self._options = {"attn_mask_type": "no_mask" if self.cross else mask}
            self._options |= {"qkv_format": self.layout}
        self._options |= {"attention_dropout": 0.0, "kv_channels": head, "name": "layer", **own}

    def build(self, **more: Any) -> nn.Module:
        """The module."""
        if "fuse_wgrad_accumulation" in more:
            more["fuse_qkv_params"] = True
        _, _, hidden, ffn = self.sizes
        if self.whole:
            return te.TransformerLayer(hidden, ffn, HEADS, **{**self._options, **more})
        return te.MultiheadAttention(hidden, HEADS, **{**self._options, **more})

    def arguments(self, bench: Bench, dtype: torch.dtype) -> Arguments:
        """The input, and the keyword arguments of the call."""
        named: dict[str, Any] = {**self._mask(bench), **self._bias(bench, dtype)}
        if share := self.of_call.get(">rope"):
            rotary = te.RotaryPositionEmbedding(
                self.head, share, interleaved=self._options.get("rotary_pos_interleaved", False)
            )
            angles = rotary.to(bench.device)(self.sizes.length)
            named["rotary_pos_emb"] = (
                (angles, angles * 0.5) if ">angles" in self.of_call else angles
            )
        if self.of_call.get(">again"):
            named["checkpoint_core_attention"] = True
        if self.cross:
            named["encoder_output"] = self._input(bench, dtype, KEYS)
        return (self._input(bench, dtype, self.sizes.length),), named

    def _input(self, bench: Bench, dtype: torch.dtype, length: int) -> torch.Tensor:
        shape: tuple[int, ...] = (length, self.sizes.batch)
        if self.layout == "bshd":
            shape = shape[::-1]
        if self.layout == "thd":
            gaps = ">gaps" in self.of_call
            shape = (length * self.sizes.batch if gaps else sum(self.real),)
        return bench.tensor(*shape, self.sizes.hidden, dtype=dtype, grad=True)

    def _mask(self, bench: Bench) -> dict[str, Any]:
        (length, batch, *_), mask = self.sizes, self.of_call.get(">mask", "causal")
        named: dict[str, Any] = {}
        if cross := self.of_call.get(">cross"):
            keys = padding_of(bench, shorter(KEYS, batch), KEYS)
            queries = torch.zeros(batch, 1, 1, length, dtype=torch.bool, device=bench.device)
            one = keys.expand(batch, 1, length, KEYS)
            named["enc_dec_attn_mask"] = (queries, keys) if cross == "pair" else one
        if mask == "arbitrary":
            named["attention_mask"] = bench.tensor(batch, 1, length, length) > 0.8
        elif ">packed" in self.of_call or ">lengths" in self.of_call:
            ends = bench.ends(self.real)
            named |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
            named |= {"max_seqlen_q": length, "max_seqlen_kv": length}
            if ">gaps" in self.of_call:
                starts = bench.ends([length] * batch)
                named |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
        elif "padding" in mask:
            named["attention_mask"] = padding_of(bench, self.real, length)
        return named

    def _bias(self, bench: Bench, dtype: torch.dtype) -> dict[str, Any]:
        kind = self.of_call.get(">bias")
        if kind == "alibi":
            slopes = bench.tensor(HEADS).abs() if ">slopes" in self.of_call else None
            return {"core_attention_bias_type": kind, "alibi_slopes": slopes}
        if kind is None:
            return {}
        bias = bench.tensor(1, HEADS, *[self.sizes.length] * 2, dtype=dtype, grad=True)
        return {"core_attention_bias_type": kind, "core_attention_bias": bias}


def _layers(kind: str, options: dict[str, Options], factors: Factors) -> Iterator[Case]:
    factors = {
        "options": tuple(options),
        **factors,
        "layout": ("bshd", "sbhd"),
        "tokens": tuple(TOKENS),
        "size": tuple(SIZES),
    }

    def makes_sense(row: Row) -> bool:
        fp8_refuses = ("bias", "alibi", "thd", "off-by-one", "learnable", "padding by")
        if row["recipe"] == "fp8 attention" and any(x in row["options"] for x in fp8_refuses):
            return False
        returns_bias = "return bias" in row["options"] and "checkpoint" in row["use"]
        calibrates_nothing = row["use"] == "calibrating" and row["recipe"] == "none"
        return not (returns_bias or calibrates_nothing)

    for row in pairwise(factors, makes_sense, apart=("options", "use")):

        def run(bench: Bench, row: Row = row) -> None:
            own = options[row["options"]]
            layer = Layer(kind, own, row["layout"], TOKENS[row["tokens"]], SIZES[row["size"]])
            subject = Subject(layer.build, layer.arguments)
            train(bench, subject, row["precision"], row["recipe"], row["use"])

        yield Case("/".join((kind, *row.values())), run)


def cases() -> Iterator[Case]:
    """The cases of this file."""
    factors: Factors = {
        "recipe": ("none", "delayed", "fp8 attention"),
        "use": ATTENTION_USES,
        "precision": ("bf16", "fp32", "autocast bf16"),
    }
    yield from _layers("MultiheadAttention", {**SHARED, **OF_ATTENTION}, factors)
    factors = {
        "recipe": (*FEW_RECIPES, "fp8 attention", "delayed E4M3"),
        "use": LAYER_USES,
        "precision": tuple(PRECISIONS),
    }
    yield from _layers("TransformerLayer", {**SHARED, **OF_LAYERS}, factors)
