"""How near trainings in FP8 come to the same trainings in bf16: losses over many seeds.

A GPT learns the sources of Python's standard library byte by byte. A seed decides the initial
weights and the batches, so that trainings of one seed are pairs: they differ by the recipe alone.
Each training is a line of `results/fidelity_MODEL.jsonl`; those that are there are not run again.

    fidelity.py --seeds 16                              all recipes, on all GPUs that are here
    fidelity.py --seeds 4 --recipes bf16 "fp8 delayed"  some
    fidelity.py --model 350m --steps 2000 --seeds 2     a larger model
    fidelity.py --table                                 differences from bf16, with their intervals
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from harness import require_gpu
from training_models import ARCHITECTURES, TINY, Architecture, our_model
from training_steps import Masters

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.data import VOCABULARY, load_text

RESULTS = Path(__file__).resolve().parent / "results"
STEPS, BATCH = 800, 8
PEAK_RATE, LEAST_SHARE, WARMUP = 6e-4, 0.1, 40  # of the learning rate, which falls as a cosine
EAGER_STEPS = 4  # before a step is captured
WINDOWS = 64  # of the validation text
CURVE = 20  # steps of a point of the curve
RECIPES: dict[str, tuple[Recipe | None, bool]] = {  # and whether weights are in FP8 alone
    "bf16": (None, False),
    "fp8 delayed": (DelayedScaling(), False),
    "fp8 current": (Float8CurrentScaling(), False),
    "fp8 blocks": (Float8BlockScaling(), False),
    "fp8 delayed, FP8 weights": (DelayedScaling(), True),
    "fp8 current, FP8 weights": (Float8CurrentScaling(), True),
    "fp8 delayed, history 16": (DelayedScaling(amax_history_len=16), False),
    "fp8 delayed, margin 1": (DelayedScaling(margin=1), False),
}
DEFAULT = tuple(RECIPES)[:6]
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 15: 2.13, 31: 2.04}


class Text:
    """Windows of the text on the GPU."""

    def __init__(self, sizes: Architecture, device: str) -> None:
        text = load_text(None)
        self.within = torch.arange(sizes.sequence + 1, device=device)
        self.train = text.train.to(device)
        starts = torch.linspace(0, len(text.validation) - sizes.sequence - 1, WINDOWS).long()
        self.validation = self.windows(text.validation.to(device), starts.to(device))

    def windows(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """`[windows, sequence + 1]`."""
        return text[starts[:, None] + self.within].long()

    def batches(self, seed: int, steps: int) -> torch.Tensor:
        """Where the windows of each step begin, `[steps, BATCH]`."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.train) - len(self.within)
        return torch.randint(last, (steps, BATCH), generator=generator).to(self.train.device)


class Training:
    """A model on its way."""

    def __init__(self, name: str, seed: int, sizes: Architecture, steps: int, text: Text) -> None:
        self.recipe, fp8_weights = RECIPES[name]
        torch.manual_seed(seed)
        with te.fp8_model_init(fp8_weights, self.recipe, preserve_high_precision_init_val=True):
            self.model = our_model(replace(sizes, vocabulary=VOCABULARY))
        self.masters = Masters(self.model)
        self.text, self.starts = text, text.batches(seed, steps)
        self.tokens = text.windows(text.train, self.starts[0])  # where a graph reads them
        device = self.tokens.device
        self.rate, self.loss = torch.zeros((), device=device), torch.zeros((), device=device)
        for group in self.masters.optimizer.param_groups:
            group["lr"] = self.rate
        self.losses = torch.zeros(steps, device=device)

    def scope(self) -> AbstractContextManager[Any]:
        if self.recipe is None:
            return nullcontext()
        return te.fp8_autocast(enabled=True, fp8_recipe=self.recipe)

    def begin(self, step: int) -> None:
        """Put what a step reads where it reads it."""
        self.tokens.copy_(self.text.windows(self.text.train, self.starts[step]))
        steps = len(self.starts)
        falling = 0.5 * (1 + math.cos(math.pi * step / steps))
        share = LEAST_SHARE + (1 - LEAST_SHARE) * falling
        self.rate.fill_(PEAK_RATE * share * min(1.0, (step + 1) / WARMUP))

    def step(self) -> None:
        with self.scope():
            loss = self.model(self.tokens)
        loss.backward()
        self.masters.step()
        self.loss.copy_(loss.detach())

    def train(self) -> None:
        """All steps; on a GPU most of them are replays of one graph."""
        run = self.step
        for step in range(len(self.starts)):
            self.begin(step)
            if step == EAGER_STEPS and self.tokens.is_cuda:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.step()
                run = graph.replay
            run()
            self.losses[step] = self.loss

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the validation windows, in the precision of the training."""
        with self.scope():
            losses = [self.model(tokens) for tokens in self.text.validation.split(BATCH)]
        return torch.stack(losses).mean().item()


def trained(name: str, seed: int, sizes: Architecture, steps: int, text: Text) -> dict[str, Any]:
    """What a line of results says."""
    started = time.monotonic()
    training = Training(name, seed, sizes, steps, text)
    training.train()
    validation = training.validate()
    curve = [round(x, 4) for x in training.losses.view(-1, CURVE).mean(1).tolist()]
    about = {"recipe": name, "seed": seed, "steps": steps, "torch": torch.__version__}
    about |= {"seconds": round(time.monotonic() - started, 1)}
    return {**about, "validation": validation, "training": curve[-1], "curve": curve}


def lines(path: Path) -> list[dict[str, Any]]:
    """The trainings that are done."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(rank: int, count: int, todo: list[tuple[str, int]], options: argparse.Namespace) -> None:
    """Every `count`-th training, on one GPU."""
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(rank)
    sizes = (TINY if options.tiny else ARCHITECTURES)[options.model]
    text = Text(sizes, device)
    end = time.monotonic() + options.seconds
    for name, seed in todo[rank::count]:
        if time.monotonic() > end:
            return
        found = trained(name, seed, sizes, options.steps, text)
        with options.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{name}, seed {seed}: {found['validation']:.4f}", flush=True)


def differences(done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each recipe: mean loss, and its mean difference from bf16 with the 95 % interval."""
    losses: dict[str, dict[int, float]] = {}
    for line in done:
        losses.setdefault(line["recipe"], {})[line["seed"]] = line["validation"]
    bf16 = losses.get("bf16", {})
    for name, by_seed in losses.items():
        pairs = [(by_seed[seed], bf16[seed]) for seed in by_seed if seed in bf16]
        if len(pairs) < 2:
            continue
        apart = [100 * (loss / yardstick - 1) for loss, yardstick in pairs]
        factor = STUDENT[max(n for n in STUDENT if n < len(pairs))]
        half = factor * statistics.stdev(apart) / math.sqrt(len(apart))
        mean = statistics.mean(loss for loss, _ in pairs)
        row = {"recipe": name, "seeds": len(pairs), "loss": round(mean, 4)}
        yield {**row, "percent": round(statistics.mean(apart), 3), "interval": round(half, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=[*ARCHITECTURES], default="125m")
    add("--recipes", nargs="+", choices=[*RECIPES], default=[*DEFAULT], metavar="RECIPE")
    add("--seeds", type=int, default=16)
    add("--steps", type=int, default=STEPS, help=f"a multiple of {CURVE}")
    add("--seconds", type=float, default=math.inf, help="begin no training after so long")
    add("--results", type=Path)
    add("--table", action="store_true", help="train nothing")
    add("--tiny", action="store_true", help="a tiny model on a CPU, to see that all runs")
    options = parser.parse_args()
    options.results = options.results or RESULTS / f"fidelity_{options.model}.jsonl"
    if not options.table:
        if not options.tiny:
            require_gpu()
        done = {(line["recipe"], line["seed"]) for line in lines(options.results)}
        wanted = [(name, seed) for seed in range(options.seeds) for name in options.recipes]
        todo = [one for one in wanted if one not in done]
        count = max(1, torch.cuda.device_count())
        mp.spawn(work, (count, todo, options), nprocs=count)
    for row in differences(lines(options.results)):
        print("  ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
