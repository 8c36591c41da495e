"""Cases of several layers, nested autocasts, a small language model, and generation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import transformer_engine.pytorch as te
from comparison.bench import FEW_RECIPES, PRECISIONS, RECIPES, Bench, Case, Row, pairwise
from comparison.training import WRAPS, Arguments, Subject, train

HIDDEN, FFN, HEADS, LONGEST, CLASSES = 64, 96, 4, 24, 40
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MIXED = ("bf16", "fp32", "autocast bf16")


class _Wrapped(nn.Module):
    """A module in a checkpoint of its own."""

    def __init__(self, module: nn.Module, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.wrap = module, wrap

    def forward(self, x: torch.Tensor) -> Any:
        """Call it."""
        return self.wrap(self.module, x)


class _Twice(nn.Module):
    """A module that is called twice in one autocast."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        """Call it."""
        return self.module(self.module(x))


class _Within(nn.Module):
    """A layer in an inner autocast, between two layers of the outer one."""

    def __init__(self, inner: dict[str, Any], **more: Any) -> None:
        super().__init__()
        self.inner = inner
        self.layers = nn.ModuleList(te.Linear(HIDDEN, HIDDEN, name=n, **more) for n in "abc")

    def forward(self, x: torch.Tensor) -> Any:
        """Call them."""
        x = self.layers[0](x)
        with te.fp8_autocast(**self.inner):
            x = self.layers[1](x)
        return self.layers[2](x)


def _layer(name: str, **more: Any) -> nn.Module:
    return te.TransformerLayer(HIDDEN, FFN, HEADS, name=name, **{**NO_DROPOUT, **more})


def _pair(**more: Any) -> nn.Module:
    return nn.Sequential(_layer("a", **more), _layer("b", **more))


def _dropping(**more: Any) -> nn.Module:
    states = te.CudaRNGStatesTracker(device=more["device"])
    states.add("model-parallel-rng", 7)
    more |= {"attention_dropout": 0.2, "get_rng_state_tracker": lambda: states}
    return _layer("a", **more)


def _mixture(**more: Any) -> nn.Module:
    plain = {name: more[name] for name in ("device", "params_dtype")}
    return nn.Sequential(
        te.LayerNormLinear(HIDDEN, FFN, name="a", normalization="RMSNorm", **more),
        nn.GELU(),
        te.Linear(FFN, HIDDEN, name="b", **more),
        te.LayerNorm(HIDDEN, **plain),
        te.LayerNormMLP(HIDDEN, FFN, name="c", activation="swiglu", **more),
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "two layers": _pair,
    "two layers, fused": lambda **more: _pair(fuse_qkv_params=True, **more),
    **{
        f"layers in checkpoints of {name}": lambda wrap=wrap, **more: nn.Sequential(
            *(_Wrapped(layer, wrap) for layer in _pair(**more))
        )
        for name, wrap in WRAPS.items()
    },
    "a layer twice": lambda **more: _Twice(_layer("a", **more)),
    "a perceptron twice": lambda **more: _Twice(te.LayerNormMLP(HIDDEN, FFN, name="a", **more)),
    "mixture": _mixture,
    "states of dropout": _dropping,
    "another region": lambda **more: _Within({"fp8_recipe": RECIPES["current"]}, **more),
    "a region without": lambda **more: _Within({"enabled": False}, **more),
}


def _models() -> Iterator[Case]:
    factors = {
        "model": tuple(MODELS),
        "recipe": (*FEW_RECIPES, "fp8 attention"),
        "precision": MIXED,
        "use": ("plain", "main_grad", "fp8 weights", "two backwards", "copied", "accumulating"),
    }

    def makes_sense(row: Row) -> bool:
        whole = ("mixture", "a perceptron twice", "two layers, fused")
        if row["use"] == "main_grad" and row["model"] not in whole:
            return False
        fp8_weights = (
            row["use"] == "fp8 weights" and row["recipe"] != "none"
        )  # made for one recipe only
        return not (fp8_weights and row["model"] == "another region")

    for row in pairwise(factors, makes_sense):

        def run(bench: Bench, row: Row = row) -> None:
            def build(**more: Any) -> nn.Module:
                return MODELS[row["model"]](**more)

            def arguments(bench: Bench, dtype: torch.dtype) -> Arguments:
                return (bench.tensor(16, 2, HIDDEN, dtype=dtype, grad=True),), {}

            train(bench, Subject(build, arguments), row["precision"], row["recipe"], row["use"])

        yield Case("/".join(("models", *row.values())), run)


def _optimizer(name: str, model: nn.Module, fp8_weights: bool) -> torch.optim.Optimizer:
    if name == "FusedAdam":
        masters = fp8_weights or any(p.dtype != torch.float32 for p in model.parameters())
        return te.optimizers.FusedAdam(
            model.parameters(), lr=0.01, weight_decay=0.1, master_weights=masters
        )
    if name == "FusedSGD":
        return te.optimizers.FusedSGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _language_model(bench: Bench, row: Row) -> None:
    """Train an embedding, two layers, a norm and a head for some steps."""
    precision, recipe = PRECISIONS[row["precision"]], RECIPES[row["recipe"]]
    more = {"device": bench.device, "params_dtype": precision.dtype}
    fp8_weights = row["weights"] == "fp8 weights"
    with te.fp8_model_init(enabled=True, recipe=recipe) if fp8_weights else nullcontext():
        layers = [_layer(name, fuse_qkv_params=True, hidden_dropout=0.1, **more) for name in "ab"]
        head = te.LayerNormLinear(HIDDEN, CLASSES, bias=False, name="head", **more)
    embedding = nn.Embedding(CLASSES, HIDDEN, device=bench.device, dtype=precision.dtype)
    model = nn.Sequential(embedding, *layers, head)
    optimizer = _optimizer(row["optimizer"], model, fp8_weights)
    for step in range(4):
        tokens = bench.integers(CLASSES, 17, 2)
        optimizer.zero_grad()
        with bench.scope(precision, recipe):
            logits = model(tokens[:-1])
        loss = te.parallel_cross_entropy(logits, tokens[1:], 0.1, True)
        loss.backward()
        optimizer.step()
        bench.found.add(f"loss{step}", loss)
    bench.found.add("state", dict(model.state_dict()))
    states = [optimizer.state[p] for p in model.parameters()]
    bench.found.add("optimizer", [dict(sorted(state.items())) for state in states])


def _language_models() -> Iterator[Case]:
    factors = {
        "optimizer": ("FusedAdam", "FusedSGD", "AdamW"),
        "recipe": FEW_RECIPES,
        "precision": MIXED,
        "weights": ("plain", "fp8 weights"),
    }

    def repeats(row: Row) -> bool:  # see `_repeats` in function_cases.py
        return row["optimizer"] != "FusedSGD" or row["precision"] != "bf16"

    for row in pairwise(factors, repeats, tables=2):
        yield Case(
            "/".join(("training", *row.values())), lambda b, row=row: _language_model(b, row)
        )


STEPS = ({"a": 4, "b": 7}, {"a": 1, "b": 1}, {"b": 1, "c": 5}, {"c": 1, "b": 3})


def _cache(bench: Bench, row: Row, dtype: torch.dtype) -> te.InferenceParams:
    if row["cache"] in ("plain", "offset on the device"):
        params = te.InferenceParams(3, LONGEST)
        if row["cache"] != "plain":
            params.sequence_len_offset = torch.tensor(0, device=bench.device)
        return params
    own: dict[str, Any] = {"num_heads_kv": 2, "head_dim_k": HIDDEN // HEADS, "dtype": dtype}
    if row["cache"] == "pages":
        own |= {"is_paged": True, "page_size": 4, "total_num_pages": 18}
    return te.InferenceParams(3, LONGEST, max_ctx_len=LONGEST, qkv_format=row["format"], **own)


@torch.no_grad()
def _generate(bench: Bench, row: Row) -> None:
    precision = PRECISIONS[row["precision"]]
    named = row["cache"] in ("names", "pages")
    layer = _layer(
        "layer",
        num_gqa_groups=2,
        layer_number=1,
        self_attn_mask_type="padding_causal" if named else "causal",
        attn_input_format=row["format"],
        device=bench.device,
        params_dtype=precision.dtype,
        window_size=(6, 0) if row["window"] == "window" else None,
    ).eval()
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS).to(bench.device)(LONGEST)
    more = {"rotary_pos_emb": angles if row["positions"] == "rope" else None}
    params = _cache(bench, row, precision.autocast or precision.dtype)
    for place, step in enumerate(STEPS if named else (6, 1, 1, 3, 1)):
        shape: tuple[int, ...]
        if isinstance(step, int):
            shape = (step, 3)
        else:
            params.pre_step(OrderedDict(step))
            shape = (max(step.values()), len(step))
        if row["format"] == "thd":
            shape = (sum(step.values()),) if isinstance(step, dict) else (step,)
        if row["format"] == "bshd":
            shape = shape[::-1]
        x = bench.tensor(*shape, HIDDEN, dtype=precision.dtype)
        with bench.scope(precision, RECIPES[row["recipe"]]):
            bench.found.add(f"step{place}", layer(x, inference_params=params, **more))
        if isinstance(step, int):
            params.sequence_len_offset += step


def _generation() -> Iterator[Case]:
    factors = {
        "cache": ("plain", "offset on the device", "names", "pages"),
        "format": ("sbhd", "bshd", "thd"),
        "recipe": ("none", "delayed", "current"),
        "positions": ("rope", "no positions"),
        "window": ("no window", "window"),
        "precision": MIXED,
    }

    def makes_sense(row: Row) -> bool:
        return row["format"] != "thd" or row["cache"] in ("names", "pages")

    for row in pairwise(factors, makes_sense, tables=2):
        yield Case("/".join(("generation", *row.values())), lambda b, row=row: _generate(b, row))


def cases() -> Iterator[Case]:
    """The cases of this file."""
    yield from _models()
    yield from _language_models()
    yield from _generation()
