"""Generation by the model of examples/generate.py: with a KV cache, in a CUDA graph, and without.

`ratio` is the time of a step divided by that of the same architecture in plain PyTorch, with a
preallocated KV cache and scaled_dot_product_attention. The same texts are generated once before
the measurement, because PyTorch takes 40 ms for the first step with each number of keys. Without a
cache, texts are generated one after the other. `equal_texts` counts texts that begin with the text
generated without a cache. Not all do: with random weights, two bytes are often almost equally
likely, and kernels that sum in another order choose the other one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import Report, require_gpu
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt.generation import cast_once, without_cache, write
from gpt.model import build_model
from gpt.settings import Settings

PROMPTS = ["\ndef ", "\nclass ", "import ", "    return "]
COUNT = 400
COUNT_WITHOUT = 50  # fewer, because each byte processes all bytes before it again
SIZES = ((6, 512, 8), (12, 768, 12))


def settings_of(
    layers: int, hidden: int, heads: int, model: str = "te", device: str = "cuda"
) -> Settings:
    """Settings like those of a run of train_gpt.py; the weights will be random."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": 1024}
    arithmetic = {"device": device, "precision": "bf16", "recipe": "delayed"}
    training = {"batch": 1, "steps": 1, "lr": 1e-3, "dropout": 0.0, "validate_every": 1}
    return Settings(data=None, seed=0, model=model, **sizes, **arithmetic, **training)


def model_of(settings: Settings) -> nn.Module:
    """The model, prepared as in generate.py."""
    torch.manual_seed(0)
    return cast_once(build_model(settings).eval(), settings)


def figures(seconds: float, steps: int) -> dict[str, Any]:
    """The figures for a row, from the time of steps that each generate a byte of every text."""
    return {
        "us_per_step": round(1e6 * seconds / steps, 1),
        "bytes_per_s": round(len(PROMPTS) * steps / seconds),
    }


def measured(
    model: nn.Module, settings: Settings, graph: bool = False
) -> tuple[dict[str, Any], list[bytes]]:
    """Generate once with a cache; returns figures and texts."""
    write(model, settings, PROMPTS, COUNT, graph=graph)  # cuDNN prepares each length once
    written = write(model, settings, PROMPTS, COUNT, graph=graph)
    return figures(len(PROMPTS) * COUNT / written.rate, COUNT), written.texts


def measured_without(model: nn.Module, settings: Settings) -> tuple[dict[str, Any], list[bytes]]:
    """Generate the beginnings of the texts without a cache; returns figures and texts."""
    without_cache(model, settings, PROMPTS, COUNT_WITHOUT)
    began = time.perf_counter()
    texts = without_cache(model, settings, PROMPTS, COUNT_WITHOUT)
    return figures(time.perf_counter() - began, COUNT_WITHOUT), texts


def main() -> None:
    require_gpu()
    report = Report("generation")
    for sizes in SIZES:
        op = f"generation, {sizes[0]} layers h{sizes[1]}, {len(PROMPTS)} texts of {COUNT} bytes"
        torch_settings, settings = settings_of(*sizes, model="torch"), settings_of(*sizes)
        peer, _ = measured(model_of(torch_settings), torch_settings)
        model = model_of(settings)
        plain, beginnings = measured_without(model, settings)
        report.row(op=op, case="torch with a cache", ratio=1.0, **peer)
        for case, graph in (("with a cache", False), ("with a cache, --graph", True)):
            found, texts = measured(model, settings, graph)
            same = sum(a.startswith(b) for a, b in zip(texts, beginnings, strict=True))
            ratio = found["us_per_step"] / peer["us_per_step"]
            report.row(op=op, case=case, ratio=round(ratio, 3), **found, equal_texts=same)
        ratio = plain["us_per_step"] / peer["us_per_step"]
        report.row(op=op, case="without a cache", ratio=round(ratio, 3), **plain)
        report.save()


if __name__ == "__main__":
    main()
