"""What all cases share: devices and inputs, precisions, recipes, and pairwise tables."""

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
    """The dtype of parameters and inputs, and of `torch.autocast` if it is on."""

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
    """Makes the inputs of a case on a device, and collects what the case finds.

    Args:
        device: `cpu` or `cuda`.
        seed: seed of the inputs, which are drawn on the CPU.

    Attributes:
        device: device of inputs and modules.
        found: the findings of the case.
    """

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.found = Findings()
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(
        self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, scale: float = 1
    ) -> torch.Tensor:
        """Normally distributed numbers.

        Args:
            shape: shape of the tensor.
            dtype: dtype of the tensor.
            grad: whether the tensor requires a gradient.
            scale: standard deviation.
        """
        x = torch.randn(shape, generator=self._generator) * scale
        return x.to(self.device, dtype).requires_grad_(grad)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Integers from 0 to `below - 1`.

        Args:
            below: upper bound, not included.
            shape: shape of the tensor.
        """
        return torch.randint(below, shape, generator=self._generator).to(self.device)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """Normally distributed numbers in the shape and dtype of `x`, for its gradient."""
        return self.tensor(*x.shape, dtype=x.dtype)

    def ends(self, lengths: Sequence[int]) -> torch.Tensor:
        """int32 `[batch + 1]`: 0 and the end of each sequence, as in `cu_seqlens`."""
        ends = [0, *itertools.accumulate(lengths)]
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    @contextmanager
    def scope(self, precision: Precision, recipe: Recipe | None, **more: bool) -> Iterator[None]:
        """Enter `torch.autocast` and `te.fp8_autocast` as requested.

        Args:
            precision: says whether `torch.autocast` is on.
            recipe: recipe of `te.fp8_autocast`; None: no `te.fp8_autocast`.
            more: `enabled` and `calibrating` of `te.fp8_autocast`.
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
    """A function that is run and adds findings.

    Attributes:
        name: a unique name; its parts are separated by `/`.
        run: the function.
        kind: `any`, `cuda` for cases that need a GPU, or `compiled`.
    """

    name: str
    run: Callable[[Bench], None]
    kind: str = "any"

    def record(self, device: str, seed: int) -> dict[str, Any]:
        """Run the case with fresh global state, and return its findings.

        Args:
            device: `cpu` or `cuda`.
            seed: seed of all random numbers.
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
            gc.collect()  # memory of CUDA graphs and of offloading
        return bench.found.entries


Row = dict[str, str]


def pairwise(
    factors: Mapping[str, Sequence[str]],
    allowed: Callable[[Row], bool] = lambda row: True,
    tables: int = 1,
    apart: Sequence[str] = (),
) -> list[Row]:
    """A pairwise test table: for every two factors, each pair of their values occurs in some row.

    The rows are the same in every call.

    Args:
        factors: the values of each factor.
        allowed: whether a row makes sense; a pair for which no such row is found is left out.
        tables: number of tables that are joined, so that most pairs occur this often.
        apart: two factors whose pairs of values need not all occur.
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
    """A public function that is in different modules in different versions.

    Args:
        name: name of the function.
        modules: modules of `transformer_engine.pytorch` to search, the documented one first.
    """
    for module in modules:
        try:
            return getattr(import_module(f"transformer_engine.pytorch.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"no {name} in {', '.join(modules)}")
