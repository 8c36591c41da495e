"""Bitwise equal results: of two runs with one seed, without recordings, and with the debugger."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from outcome import Outcome, until

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.chain.chain import Chain

_RECIPES = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
_STEPS = 3


def run(seconds: float, seed: int, device: str = "cpu") -> Outcome:
    """Train a layer in each of several ways, and compare results bitwise, until time is up."""
    found = Outcome("determinism" if device == "cpu" else "determinism_cuda")
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "the same again": nullcontext,
        "without recordings": without_recordings,
        "every statistic": _inspected,
        "deterministic algorithms": _deterministic,
    }
    names = list(_RECIPES)
    for number in until(seconds, least=len(names)):
        name = names[number % len(names)]
        sizes = (32 * (1 + number % 3), 16 * (1 + number % 2) + number % 5, 1 + number % 2)
        expected = _train(name, seed + number, sizes, device)
        for way, context in ways.items():
            with context():
                actual = _train(name, seed + number, sizes, device)
            found.count("runs compared")
            if expected != actual:
                found.failures.append(f"{name}, sizes {sizes}, seed {seed + number}: {way}")
    return found


def _train(name: str, seed: int, sizes: tuple[int, int, int], device: str) -> list[bytes]:
    """The bytes of the losses and the final parameters of a short training."""
    torch.manual_seed(seed)
    hidden, tokens, batch = sizes
    layer = te.TransformerLayer(
        hidden, 2 * hidden, 2, device=device, params_dtype=torch.bfloat16, name="layer"
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen = []
    for _ in range(_STEPS):
        x = torch.randn(tokens, batch, hidden, device=device, dtype=torch.bfloat16)
        with te.fp8_autocast(enabled=name != "bf16", fp8_recipe=_RECIPES[name]):
            loss = layer(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        debug_api.step()
        seen.append(loss.detach())
    tensors = [*seen, *layer.parameters()]
    return [t.detach().float().cpu().numpy().tobytes() for t in tensors]


@contextmanager
def without_recordings() -> Iterator[None]:
    """Turn off recordings: every call runs stage by stage."""
    before = Chain.most_shapes
    Chain.most_shapes = 0
    try:
        yield
    finally:
        Chain.most_shapes = before


@contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _inspected() -> Any:
    every = {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "."},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "gradient", "weight", "output", "wgrad", "dgrad"],
                "stats": ["min", "max", "mean", "std", "l1_norm", "l2_norm", "dynamic_range"],
            }
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        debug_api.initialize({"every": every}, log_dir=folder)
        try:
            yield
        finally:
            debug_api.end_debug()
