"""Cases of Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, of norms and of `te.ops`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import transformer_engine.pytorch as te
from comparison.bench import DELAYED, FEW_RECIPES, PRECISIONS, RECIPES, Bench, Case, Row, pairwise
from comparison.training import USES, Arguments, Subject, train

IN, OUT = 64, 96
Options = dict[str, dict[str, Any]]
LEADING = {
    "32 tokens": (32,),
    "37 tokens": (37,),
    "3x16 tokens": (3, 16),
    "5x7 tokens": (5, 7),
    "1 token": (1,),
    "no tokens": (0,),
    "48 tokens, strided": (48,),
}
RMS = {"normalization": "RMSNorm"}
LINEAR: Options = {
    "bias": {},
    "no bias": {"bias": False},
    "return bias": {"return_bias": True},
    "split": {"parameters_split": {"query": 32, "key": 48, "value": 16}},
    "odd size": {"in_features": 60},
}
NORM_LINEAR: Options = {
    "LayerNorm": {},
    "RMSNorm": RMS,
    "zero-centered": {"zero_centered_gamma": True},
    "zero-centered RMSNorm, no bias": {**RMS, "zero_centered_gamma": True, "bias": False},
    "norm output": {"return_layernorm_output": True},
    "norm output, return bias": {"return_layernorm_output": True, "return_bias": True},
    "return input": {"return_input": True},
    "split RMSNorm": {**RMS, "parameters_split": ("query", "key", "value")},
}
MLP: Options = {
    **{name: {"activation": name} for name in ("gelu", "qgelu", "relu", "srelu", "silu")},
    **{name: {"activation": name} for name in ("geglu", "qgeglu", "reglu", "sreglu", "swiglu")},
    "swiglu, RMSNorm, no bias": {**RMS, "activation": "swiglu", "bias": False},
    "zero-centered": {"zero_centered_gamma": True},
    "return bias": {"return_bias": True},
    "norm output": {"return_layernorm_output": True},
    "norm output, return bias": {"return_layernorm_output": True, "return_bias": True},
    "return input": {"return_input": True, **RMS},
    "checkpoint": {"checkpoint": True},
    "checkpoint, swiglu": {"checkpoint": True, "activation": "swiglu"},
}
GROUPED: Options = {"bias": {}, "no bias": {"bias": False}, "return bias": {"return_bias": True}}
SPLITS = {
    "16, 32, 16 rows": [16, 32, 16],
    "5, 11, 21 rows": [5, 11, 21],
    "0, 40, 3 rows": [0, 40, 3],
}
ACTIVATIONS = ("GELU", "GEGLU", "QGELU", "QGEGLU", "ReLU", "ReGLU", "SReLU", "SReGLU", "SiLU")
MOST_USES = (
    "plain",
    "microbatches",
    "calibrating",
    "fp8 weights, microbatches",
    "main_grad",
    "frozen weights",
    "constant input",
    "two backwards",
    "reloaded",
    "checkpoint of te, microbatches",
)
NORM_USES = ("plain", "frozen weights", "constant input", "two backwards", "checkpoint of te")
NORMS: Options = {"plain": {}, "zero-centered": {"zero_centered_gamma": True}, "eps": {"eps": 0.1}}
ALL_RECIPES = [recipe for recipe in RECIPES if recipe != "fp8 attention"]


def inputs(bench: Bench, dtype: torch.dtype, tokens: str, features: int = IN) -> torch.Tensor:
    """The input of a layer, with a gradient.

    Args:
        bench: draws the values.
        dtype: dtype of the input.
        tokens: a key of LEADING.
        features: size of the last dimension.
    """
    if "strided" in tokens:
        columns = bench.tensor(features, *LEADING[tokens], dtype=dtype)
        return columns.t().requires_grad_()
    return bench.tensor(*LEADING[tokens], features, dtype=dtype, grad=True)


def _makes_sense(row: Row) -> bool:
    calibrates_nothing = row["use"] == "calibrating" and row["recipe"] == "none"
    keeps = row["use"] == "keeping inputs" and row["recipe"] in DELAYED
    # Parts of a weight have no main_grad. A checkpoint that returns a leaf (the bias) recurses in
    # torch without end.
    splits = "split" in row.get("options", "") and "main_grad" in row["use"]
    returns = "return bias" in row.get("options", "") and "checkpoint" in row["use"]
    return not (calibrates_nothing or keeps or splits or returns)


def _layers(
    kind: str, options: Options, uses: Sequence[str], recipes: Sequence[str]
) -> Iterator[Case]:
    factors = {
        "use": uses,
        "recipe": recipes,
        "options": list(options),
        "tokens": list(SPLITS if kind == "GroupedLinear" else LEADING),
        "precision": list(PRECISIONS),
    }
    for row in pairwise(factors, _makes_sense, apart=("options", "use")):
        own = options[row["options"]]

        def run(bench: Bench, row: Row = row, own: dict[str, Any] = own) -> None:
            def build(**more: Any) -> nn.Module:
                sizes: dict[str, Any] = {"in_features": IN, "out_features": OUT}
                if kind == "LayerNormMLP":
                    sizes = {"hidden_size": IN, "ffn_hidden_size": OUT}
                if kind == "GroupedLinear":
                    sizes["num_gemms"] = 3
                return getattr(te, kind)(**{**sizes, "name": "layer", **own, **more})

            def arguments(bench: Bench, dtype: torch.dtype) -> Arguments:
                if kind == "GroupedLinear":
                    splits = SPLITS[row["tokens"]]
                    rows = bench.tensor(sum(splits), IN, dtype=dtype, grad=True)
                    return (rows,), {"m_splits": splits}
                return (inputs(bench, dtype, row["tokens"], own.get("in_features", IN)),), {}

            train(bench, Subject(build, arguments), row["precision"], row["recipe"], row["use"])

        yield Case("/".join((kind, *row.values())), run)


def _norms() -> Iterator[Case]:
    factors = {
        "kind": ("LayerNorm", "RMSNorm", "ops.LayerNorm", "ops.RMSNorm"),
        "options": list(NORMS),
        "tokens": list(LEADING),
        "use": NORM_USES,
        "precision": list(PRECISIONS),
    }
    for row in pairwise(factors):

        def run(bench: Bench, row: Row = row) -> None:
            module, name = te.ops if "ops" in row["kind"] else te, row["kind"].split(".")[-1]

            def build(**more: Any) -> nn.Module:
                return getattr(module, name)(IN, **NORMS[row["options"]], **more)

            subject = Subject(
                build, lambda bench, dtype: ((inputs(bench, dtype, row["tokens"]),), {})
            )
            train(bench, subject, row["precision"], "none", row["use"], 2)

        yield Case("/".join(("norms", *row.values())), run)


def _sequence(bias: bool, activation: str, norm: str, **more: Any) -> nn.Module:
    """The operations of LayerNormMLP, as a `te.ops.Sequential`."""
    ops, wide = te.ops, OUT * (2 if "GLU" in activation else 1)
    fuse = {"accumulate_into_main_grad": more.pop("fuse_wgrad_accumulation", False)}
    biases = [ops.Bias(wide, **more), ops.Bias(IN, **more)] if bias else [nn.Identity()] * 2
    return ops.Sequential(
        getattr(ops, norm)(IN, **more),
        ops.BasicLinear(IN, wide, name="first", **fuse, **more),
        biases[0],
        getattr(ops, activation)(),
        ops.BasicLinear(OUT, IN, name="second", **fuse, **more),
        biases[1],
    )


def _operations() -> Iterator[Case]:
    factors = {
        "activation": (*ACTIVATIONS, "SwiGLU"),
        "recipe": FEW_RECIPES,
        "bias": ("bias", "no bias"),
        "norm": ("LayerNorm", "RMSNorm"),
        "tokens": list(LEADING),
        "use": ("plain", "fp8 weights", "main_grad", "checkpoint of te", "frozen weights"),
        "precision": list(PRECISIONS),
    }
    for row in pairwise(factors, _makes_sense):

        def run(bench: Bench, row: Row = row) -> None:
            def build(**more: Any) -> nn.Module:
                return _sequence(row["bias"] == "bias", row["activation"], row["norm"], **more)

            subject = Subject(
                build, lambda bench, dtype: ((inputs(bench, dtype, row["tokens"]),), {}), "dtype"
            )
            train(bench, subject, row["precision"], row["recipe"], row["use"], 2)

        yield Case("/".join(("ops", *row.values())), run)


def cases() -> Iterator[Case]:
    """The cases of this file."""
    yield from _layers("Linear", LINEAR, list(USES), ALL_RECIPES)
    yield from _layers("LayerNormLinear", NORM_LINEAR, MOST_USES, FEW_RECIPES)
    yield from _layers("LayerNormMLP", MLP, MOST_USES, FEW_RECIPES)
    yield from _layers("GroupedLinear", GROUPED, (*MOST_USES, "keeping inputs"), FEW_RECIPES)
    yield from _norms()
    yield from _operations()
