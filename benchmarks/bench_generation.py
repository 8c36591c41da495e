"""Generation by the model of examples/generate.py, with a cache of keys and values and without.

`ratio` is the time without the cache, text by text, over the time with it, of all at once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from harness import Report, require_gpu

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt.generation import without_cache, write
from gpt.model import build_model
from gpt.settings import Settings

PROMPTS = ["\ndef ", "\nclass ", "import ", "    return "]
COUNT = 200
SIZES = ((6, 512, 8), (12, 768, 12))


def settings_of(layers: int, hidden: int, heads: int, device: str = "cuda") -> Settings:
    """What a run of train_gpt.py would have set; the weights are random."""
    model = {"model": "te", "layers": layers, "hidden": hidden, "heads": heads, "seq": 1024}
    arithmetic = {"device": device, "precision": "bf16", "recipe": "delayed"}
    training = {"batch": 1, "steps": 1, "lr": 1e-3, "dropout": 0.0, "validate_every": 1}
    return Settings(data=None, seed=0, **model, **arithmetic, **training)


def main() -> None:
    require_gpu()
    report = Report("generation")
    for layers, hidden, heads in SIZES:
        settings = settings_of(layers, hidden, heads)
        torch.manual_seed(0)
        model = build_model(settings).eval()
        write(model, settings, PROMPTS, 8)  # what is set up once
        without_cache(model, settings, PROMPTS, 4)
        kept = write(model, settings, PROMPTS, COUNT)
        began = time.perf_counter()
        plain = without_cache(model, settings, PROMPTS, COUNT)
        rate = len(PROMPTS) * COUNT / (time.perf_counter() - began)
        same = sum(a == b for a, b in zip(kept.texts, plain, strict=True))
        report.row(
            op="generation with a cache",
            case=f"{layers} layers h{hidden}, {len(PROMPTS)} texts of {COUNT} bytes",
            ratio=round(kept.rate / rate, 2),
            bytes_per_s=round(kept.rate),
            bytes_per_s_without=round(rate),
            us_per_step=round(1e6 * len(PROMPTS) / kept.rate, 1),
            equal_texts=same,
        )
    report.save()


if __name__ == "__main__":
    main()
