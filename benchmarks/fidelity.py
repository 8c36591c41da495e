"""Compares the losses of trainings in FP8 with the same trainings in bf16, over many seeds.

Trainings are those of `examples/train_gpt.py`, on the sources of Python's standard library. A seed
determines the initial weights and the batches, so trainings with the same seed differ only in the
precision, and their losses can be compared in pairs. Each training is a line of
`results/fidelity_SIZE.jsonl`; trainings that are in the file are not run again.

    fidelity.py --seeds 16                         all precisions, on all GPUs of this machine
    fidelity.py --seeds 4 --only bf16 "fp8 delayed"
    fidelity.py --size 350m --steps 2000 --seeds 2
    fidelity.py --table                            differences from bf16, with their intervals
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from harness import require_gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.data import Text, load_text
from gpt.settings import SIZES, Settings
from gpt.training import Training

RESULTS = Path(__file__).resolve().parent / "results"
SIZES_HERE = {
    **SIZES,
    "350m": {**SIZES["125m"], "layers": 24, "hidden": 1024, "heads": 16, "seq": 2048, "batch": 4},
}
STEPS = 800
POINTS = 40  # points of a loss curve
FP8 = [{"precision": "fp8", "recipe": recipe} for recipe in ("delayed", "current", "blocks")]
BF16: dict[str, Any] = {"precision": "bf16", "recipe": "delayed"}
KINDS: list[dict[str, Any]] = [BF16, *FP8, *({**kind, "fp8_weights": True} for kind in FP8[:2])]
# Two-sided 95 % quantiles of Student's distribution, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 15: 2.13, 31: 2.04}


def settings_of(kind: dict[str, Any], seed: int, size: str, steps: int, device: str) -> Settings:
    """The settings of a training."""
    numbers = {**SIZES_HERE[size], "steps": steps}
    others = {"data": None, "model": "te", "dropout": 0.0, "validate_every": steps}
    return Settings(**others, **kind, **numbers, seed=seed, device=device)


def trained(settings: Settings, text: Text) -> dict[str, Any]:
    """Train; returns the content of a line of results."""
    started, training = time.monotonic(), Training(settings, text)
    training.advance(settings.steps)
    validation = training.validate()
    curve = [round(part.mean().item(), 4) for part in training.losses.chunk(POINTS)]
    about = {"precision": settings.label, "seed": settings.seed, "steps": settings.steps}
    about |= {"torch": torch.__version__, "seconds": round(time.monotonic() - started, 1)}
    return {**about, "validation": validation, "curve": curve}


def lines(path: Path) -> list[dict[str, Any]]:
    """The trainings in a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(rank: int, count: int, todo: list[Settings], options: argparse.Namespace) -> None:
    """Run every `count`-th training on one GPU, beginning with number `rank`."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    text, end = load_text(None), time.monotonic() + options.seconds
    for settings in todo[rank::count]:
        if time.monotonic() > end:
            return
        found = trained(settings, text)
        with options.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{settings.label}, seed {settings.seed}: {found['validation']:.4f}", flush=True)


def pairs_of(done: list[dict[str, Any]]) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Pairs of a training and the bf16 training of the same seed, by precision, if several."""
    bf16 = {line["seed"]: line for line in done if line["precision"] == "bf16"}
    found: dict[str, list[Any]] = {}
    for line in sorted(done, key=lambda line: line["seed"]):
        if line["seed"] in bf16:
            found.setdefault(line["precision"], []).append((line, bf16[line["seed"]]))
    return {name: pairs for name, pairs in found.items() if len(pairs) > 1}


def percent(losses: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean percentage of the first loss above the second one, and half of its 95 % interval."""
    apart = [100 * (loss / yardstick - 1) for loss, yardstick in losses]
    factor = STUDENT[max(n for n in STUDENT if n < len(apart))]
    return statistics.mean(apart), factor * statistics.stdev(apart) / math.sqrt(len(apart))


def differences(done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each precision: mean loss, and mean difference from bf16 with its 95 % interval."""
    for name, pairs in pairs_of(done).items():
        losses = [(line["validation"], yardstick["validation"]) for line, yardstick in pairs]
        mean, half = percent(losses)
        loss = statistics.mean(loss for loss, _ in losses)
        row = {"precision": name, "seeds": len(pairs), "loss": round(loss, 4)}
        yield {**row, "percent": round(mean, 3), "interval": round(half, 3)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=[*SIZES_HERE], default="125m", help="tiny: also on a CPU")
    add("--only", nargs="+", metavar="PRECISION", help="by the names in the results")
    add("--seeds", type=int, default=16)
    add("--steps", type=int, default=STEPS)
    add("--seconds", type=float, default=math.inf, help="begin no training after so long")
    add("--results", type=Path)
    add("--table", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    options.results = options.results or RESULTS / f"fidelity_{options.size}.jsonl"
    if not options.table:
        if options.size != "tiny":
            require_gpu()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        done = {(line["precision"], line["seed"]) for line in lines(options.results)}
        wanted = [
            settings_of(kind, seed, options.size, options.steps, device)
            for seed in range(options.seeds)
            for kind in KINDS
        ]
        todo = [
            one
            for one in wanted
            if (one.label, one.seed) not in done and one.label in (options.only or [one.label])
        ]
        count = max(1, torch.cuda.device_count())
        mp.spawn(work, (count, todo, options), nprocs=count)
    for row in differences(lines(options.results)):
        print("  ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
