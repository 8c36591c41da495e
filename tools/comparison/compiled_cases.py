"""Cases of compiled modules. There are few, because each compilation takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import transformer_engine.pytorch as te
from comparison.bench import Bench, Case
from comparison.training import Arguments, Subject, train

HIDDEN, FFN = 64, 96


NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Class, options, recipe, tokens in a sequence, use.
COMPILED: tuple[tuple[str, dict[str, Any], str, int, str], ...] = (
    ("Linear", {}, "none", 16, "plain"),
    ("Linear", {}, "delayed", 13, "plain"),
    ("Linear", {}, "current", 16, "microbatches"),
    ("LayerNormMLP", {"activation": "swiglu"}, "none", 13, "plain"),
    ("LayerNormMLP", {}, "delayed", 16, "main_grad"),
    ("LayerNormMLP", {"checkpoint": True}, "delayed", 16, "plain"),
    ("LayerNormMLP", {}, "current", 13, "plain"),
    ("TransformerLayer", NO_DROPOUT, "none", 16, "plain"),
    ("TransformerLayer", NO_DROPOUT, "delayed", 16, "plain"),
    ("TransformerLayer", NO_DROPOUT, "current", 13, "plain"),
    ("TransformerLayer", NO_DROPOUT, "fp8 attention", 16, "plain"),
)


def _case(kind: str, options: dict[str, Any], recipe: str, tokens: int, use: str) -> Case:
    def build(**more: Any) -> nn.Module:
        heads = {"num_attention_heads": 4} if kind == "TransformerLayer" else {}
        arguments = {"name": "layer", **heads, **options, **more}
        module: nn.Module = getattr(te, kind)(HIDDEN, FFN, **arguments)
        module.compile(fullgraph=True, backend="aot_eager")
        return module

    def arguments(bench: Bench, dtype: torch.dtype) -> Arguments:
        return (bench.tensor(tokens, 2, HIDDEN, dtype=dtype, grad=True),), {}

    def run(bench: Bench) -> None:
        train(bench, Subject(build, arguments), "bf16", recipe, use)

    shown = [name for name in options if "dropout" not in name]
    parts = ("compiled", kind, *shown, recipe, f"{tokens}x2 tokens", use)
    return Case("/".join(parts), run, "compiled")


def cases() -> Iterator[Case]:
    """The cases of this file."""
    yield from (_case(*row) for row in COMPILED)
