"""What all cases share: where they run, precisions, recipes, and tables of pairs."""

from __future__ import annotations

import gc
import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

import transformer_engine.pytorch as te
from comparison.findings import Findings
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    Recipe,
)


class Precision(NamedTuple):
    """Of parameters and inputs, and of `torch.autocast` where that is on."""

    dtype: torch.dtype
    autocast: torch.dtype | None = None


PRECISIONS = {
    "bf16": Precision(torch.bfloat16),
    "fp32": Precision(torch.float32),
    "fp16": Precision(torch.float16),
    "autocast bf16": Precision(torch.float32, torch.bfloat16),
    "autocast fp16": Precision(torch.float32, torch.float16),
}
HISTORY = {"amax_history_len": 4}
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": DelayedScaling(**HISTORY),
    "delayed E4M3": DelayedScaling(margin=1, fp8_format=Format.E4M3, **HISTORY),
    "most recent": DelayedScaling(amax_compute_algo="most_recent", **HISTORY),
    "current": Float8CurrentScaling(),
    "current power of 2": Float8CurrentScaling(use_power_2_scales=True),
    "blocks": Float8BlockScaling(),
    "blocks fp32 scales": Float8BlockScaling(use_f32_scales=True),
    "fp8 attention": DelayedScaling(fp8_dpa=True, **HISTORY),
}
DELAYED = ("delayed", "delayed E4M3", "most recent", "fp8 attention")
FEW_RECIPES = ("none", "delayed", "current", "blocks")


class Bench:
    """Where a case runs.

    Args:
        device: `cpu` or `cuda`.
        seed: of the inputs, which are drawn on the CPU.

    Attributes:
        device: where inputs and modules are.
        found: what the case has found.
    """

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.found = Findings()
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(
        self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, scale: float = 1
    ) -> torch.Tensor:
        """Normal numbers.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            grad: whether it requires a gradient.
            scale: their deviation.
        """
        x = torch.randn(shape, generator=self._generator) * scale
        return x.to(self.device, dtype).requires_grad_(grad)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Integers from 0 on.

        Args:
            below: all are smaller.
            shape: of the tensor.
        """
        return torch.randint(below, shape, generator=self._generator).to(self.device)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """Normal numbers, as the gradient of a tensor has."""
        return self.tensor(*x.shape, dtype=x.dtype)

    def ends(self, lengths: Sequence[int]) -> torch.Tensor:
        """int32 `[batch + 1]`: where sequences end, as `cu_seqlens` says."""
        ends = [0, *itertools.accumulate(lengths)]
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    @contextmanager
    def scope(self, precision: Precision, recipe: Recipe | None, **more: bool) -> Iterator[None]:
        """Inside of the autocasts that are asked for.

        Args:
            precision: says whether `torch.autocast` is on.
            recipe: of `te.fp8_autocast`; None is without it.
            more: `enabled` and `calibrating`.
        """
        mixed: Any = nullcontext()
        if precision.autocast is not None:
            mixed = torch.autocast(self.device, precision.autocast)
        fp8: Any = nullcontext()
        if recipe is not None:
            fp8 = te.fp8_autocast(**{"enabled": True, **more}, fp8_recipe=recipe)
        with mixed, fp8:
            yield


@dataclass(frozen=True)
class Case:
    """Something that is run and leaves findings.

    Attributes:
        name: unique; `/` stands between its parts.
        run: runs it.
        kind: `any`, `cuda` for cases of GPUs alone, or `compiled`.
    """

    name: str
    run: Callable[[Bench], None]
    kind: str = "any"

    def record(self, device: str, seed: int) -> dict[str, Any]:
        """Run it, whatever ran before, and return what was found.

        Args:
            device: `cpu` or `cuda`.
            seed: of everything that is drawn.
        """
        seed = zlib.crc32(f"{seed} {self.name}".encode())  # generators of the CPU take 32 bits
        te.fp8.FP8GlobalStateManager.reset()
        te.gemm_report(reset=True)
        if self.kind == "compiled":
            torch._dynamo.reset()
        random.seed(seed)
        torch.manual_seed(seed)
        bench = Bench(device, seed)
        try:
            self.run(bench)
            if device == "cuda":
                torch.cuda.synchronize()
            counts = te.gemm_report().counts
            bench.found.add("gemms", {"/".join(key): n for key, n in sorted(counts.items())})
        except Exception as error:  # an error is a finding like any other
            bench.found.fail(error)
        if self.kind == "cuda":
            gc.collect()  # what graphs and hosts hold
        return bench.found.entries


Row = dict[str, str]


def pairwise(
    factors: Mapping[str, Sequence[str]],
    allowed: Callable[[Row], bool] = lambda row: True,
    tables: int = 1,
    apart: Sequence[str] = (),
) -> list[Row]:
    """Rows in which every two values of two factors meet; the same at every call.

    Args:
        factors: the values of each.
        allowed: whether a row makes sense; pairs that no row of these has are left out.
        tables: so often do two values meet, if others allow it.
        apart: two factors whose values need not all meet.
    """
    rows = [row for seed in range(tables) for row in _table(factors, allowed, seed, set(apart))]
    return [row for place, row in enumerate(rows) if row not in rows[:place]]


def _table(
    factors: Mapping[str, Sequence[str]],
    allowed: Callable[[Row], bool],
    seed: int,
    apart: set[str],
) -> list[Row]:
    draw = random.Random(seed)
    sides = [[(name, value) for value in values] for name, values in factors.items()]
    missing = {
        (one, other): None
        for a, b in itertools.combinations(sides, 2)
        for one, other in itertools.product(a, b)
        if {one[0], other[0]} != apart
    }

    def gain(row: Row) -> int:
        return sum(pair in missing for pair in itertools.combinations(row.items(), 2))

    rows: list[Row] = []
    while missing:
        wanted = next(iter(missing))
        tries = (
            {name: draw.choice(values) for name, values in factors.items()} | dict(wanted)
            for _ in range(200)
        )
        best = max(filter(allowed, tries), key=gain, default=None)
        missing.pop(wanted)
        if best is not None:
            rows.append(best)
            for pair in itertools.combinations(best.items(), 2):
                missing.pop(pair, None)
    return rows


def public(name: str, *modules: str) -> Any:
    """A function that versions keep in different modules.

    Args:
        name: of the function.
        modules: of `transformer_engine.pytorch`, the documented one first.
    """
    for module in modules:
        try:
            return getattr(import_module(f"transformer_engine.pytorch.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"no {name} in {', '.join(modules)}")
