"""Cases that need a GPU: sizes for which libraries choose other kernels, graphs, offloading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import transformer_engine.pytorch as te
from comparison import attention_cases, layer_cases
from comparison.bench import FEW_RECIPES, RECIPES, Bench, Case, Row, pairwise
from comparison.layer_cases import Layer, Sizes
from comparison.training import Arguments, Subject, train

MIDDLE = Sizes(256, 2, 256, 512)
BEYOND = Sizes(8192, 4, 1024, 1024)  # an input of 64 MiB in bf16
OPTIONS = (
    "plain",
    "fused qkv",
    "fused groups",
    "flat group",
    "RMSNorm, swiglu",
    "llama",
    "both dropouts",
    "window",
    "padding by lengths",
    "thd",
    "thd with gaps",
    "rope, interleaved",
    "core again",
    "post_scale_bias",
    "alibi",
    "learnable",
    "decoder, fused groups",
)
USES = ("plain", "microbatches", "main_grad", "fp8 weights", "checkpoint of te, not reentrant")


def _layers() -> Iterator[Case]:
    every = {**layer_cases.SHARED, **layer_cases.OF_LAYERS}
    factors = {
        "options": OPTIONS,
        "recipe": (*FEW_RECIPES, "fp8 attention"),
        "use": USES,
        "layout": ("bshd", "sbhd"),
        "precision": ("bf16", "fp16"),
    }
    refused = ("bias", "alibi", "thd", "learnable", "padding")

    def makes_sense(row: Row) -> bool:
        fp8 = row["recipe"] == "fp8 attention"
        return not (fp8 and any(name in row["options"] for name in refused))

    for row in pairwise(factors, makes_sense, apart=("options", "use")):

        def run(bench: Bench, row: Row = row) -> None:
            layer = Layer("TransformerLayer", every[row["options"]], row["layout"], MIDDLE, 64)
            subject = Subject(layer.build, layer.arguments)
            train(bench, subject, row["precision"], row["recipe"], row["use"])

        yield Case("/".join(("large layers", *row.values())), run, "cuda")


def _beyond() -> Iterator[Case]:
    for options, recipe in (("fused qkv", "none"), ("fused qkv", "delayed"), ("llama", "current")):

        def run(bench: Bench, options: str = options, recipe: str = recipe) -> None:
            every = {**layer_cases.SHARED, **layer_cases.OF_LAYERS}
            layer = Layer("TransformerLayer", every[options], "bshd", BEYOND, 256)
            train(bench, Subject(layer.build, layer.arguments), "bf16", recipe, "plain", 1)

        yield Case(f"64 MiB/{options}/{recipe}", run, "cuda")


def _attention() -> Iterator[Case]:
    factors = {
        **attention_cases.FACTORS,
        "lengths": ("512 of 512", "300 of 700"),
        "size": ("64", "128"),
        "precision": ("bf16", "fp16"),
    }
    for row in pairwise(factors, attention_cases.makes_sense):

        def run(bench: Bench, row: Row = row) -> None:
            problem = attention_cases.Problem(row)
            subject = Subject(problem.build, problem.arguments)
            train(bench, subject, row["precision"], row["recipe"], row["use"], 2)

        yield Case("/".join(("large attention", *row.values())), run, "cuda")


def _products() -> Iterator[Case]:
    kinds = ("Linear", "LayerNormLinear", "LayerNormMLP")
    factors = {"kind": kinds, "recipe": tuple(RECIPES)[:-1], "use": USES, "tokens": ("2048", "999")}
    for row in pairwise(factors):

        def run(bench: Bench, row: Row = row) -> None:
            def build(**more: Any) -> nn.Module:
                return getattr(te, row["kind"])(512, 2048, name="layer", **more)

            def arguments(bench: Bench, dtype: torch.dtype) -> Arguments:
                return (bench.tensor(int(row["tokens"]), 512, dtype=dtype, grad=True),), {}

            train(bench, Subject(build, arguments), "bf16", row["recipe"], row["use"])

        yield Case("/".join(("large products", *row.values())), run, "cuda")


def _graphed() -> Iterator[Case]:
    factors = {
        "module": ("TransformerLayer", "LayerNormMLP", "Linear"),
        "recipe": ("none", "delayed", "current"),
        "use": ("plain", "main_grad"),
    }
    for row in pairwise(factors):

        def run(bench: Bench, row: Row = row) -> None:
            recipe = RECIPES[row["recipe"]]

            def build(**more: Any) -> nn.Module:
                if row["module"] == "TransformerLayer":
                    return Layer("TransformerLayer", {}, "sbhd", MIDDLE, 64).build(**more)
                return getattr(te, row["module"])(256, 512, name="layer", **more)

            def arguments(bench: Bench, dtype: torch.dtype) -> Arguments:
                return (bench.tensor(256, 2, 256, dtype=dtype, grad=True),), {}

            def wrapped(module: nn.Module) -> nn.Module:
                sample = arguments(bench, torch.bfloat16)[0]
                fp8 = {"fp8_enabled": recipe is not None, "fp8_recipe": recipe}
                return te.make_graphed_callables(module, sample, **fp8)

            subject = Subject(build, arguments, finish=wrapped)
            train(bench, subject, "bf16", row["recipe"], row["use"])

        yield Case("/".join(("graphed", *row.values())), run, "cuda")


class _Offloaded(nn.Module):
    """Layers whose saved tensors are offloaded to the host until the backward."""

    def __init__(self, weights: bool, **more: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer("TransformerLayer", {}, "sbhd", MIDDLE, 64).build(**{**more, "name": name})
            for name in "abc"
        )
        self.context, self.synchronize = te.get_cpu_offload_context(
            True, 2, True, weights, model_layers=3
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call them."""
        for layer in self.layers:
            with self.context:
                x = layer(x)
            x = self.synchronize(x)
        return x


def _offloaded() -> Iterator[Case]:
    for recipe in ("none", "delayed"):

        def run(bench: Bench, recipe: str = recipe) -> None:
            def build(**more: Any) -> nn.Module:
                return _Offloaded(recipe == "delayed", **more)

            def arguments(bench: Bench, dtype: torch.dtype) -> Arguments:
                return (bench.tensor(256, 2, 256, dtype=dtype, grad=True),), {}

            train(bench, Subject(build, arguments), "bf16", recipe, "plain")

        yield Case(f"offloaded/{recipe}", run, "cuda")


def cases() -> Iterator[Case]:
    """The cases of this file."""
    yield from _layers()
    yield from _beyond()
    yield from _attention()
    yield from _products()
    yield from _graphed()
    yield from _offloaded()
