"""Tensors of more than 2^31 elements, and of more than 2^32: operators and modules on a GPU.

Each call is repeated on slices of its arguments, whose sizes the other tests cover. The rows of the
results must be equal: bitwise if the call has no GEMM, else within a bound. Sums over rows, and
values that are merged into an argument, must agree within a bound. The command is

    python tools/soak large --device cuda --seconds 1

On a CPU the sizes are small, to test this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from large_cases import CASES, CHECKS, Work
from outcome import Outcome

from transformer_engine.pytorch.kernels.moments import MOMENTS

_BOUNDS = {"cuda": (1 << 31, 1 << 32), "cpu": (1 << 21,)}
_SLICE = {"cuda": 1 << 27, "cpu": 1 << 20}  # elements
_NEAR = 3e-2  # bound for results of GEMMs, as a share of the largest value
_SUM = 2e-3  # bound for a sum over rows
_MEAN, _SUMS = MOMENTS.index("mean"), slice(MOMENTS.index("m2"), MOMENTS.index("min"))
_MERGED = 1e-5  # bound for merged sums, whose order differs; other merged values are exact


def run(seconds: float, seed: int, device: str = "cpu") -> Outcome:
    """Run every case once, whatever `seconds` says."""
    del seconds
    found = Outcome("large" if device == "cpu" else "large_cuda")
    for bound in _BOUNDS[device]:
        for name in (*CASES, *CHECKS):
            torch.manual_seed(seed)
            size = f"above 2^{bound.bit_length() - 1} elements"
            try:
                problems = _problems(name, bound, device)
            except torch.OutOfMemoryError:
                found.count(f"{size} that do not fit")
                print(f"{name} {size}: does not fit", flush=True)
                continue
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
            found.count(f"calls {size}")
            found.failures += [f"{name} {size}: {problem}" for problem in problems]
            print(f"{name} {size}: {problems or 'alike'}", flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
    return found


def _problems(name: str, bound: int, device: str) -> list[str]:
    if name in CHECKS:
        return CHECKS[name](bound, device)
    case = CASES[name]
    multiple = case.multiple
    step = max(1, _SLICE[device] // case.elements // multiple) * multiple
    rows = (bound // case.elements // step + 1) * step
    return _compare(case.make(rows, device), rows, step, case.exact)


def _compare(work: Work, rows: int, step: int, exact: bool) -> list[str]:
    """Differences between a call on all rows and calls on slices of `step` rows."""
    merged = [place.clone() for place in work.places]
    whole = work.call(*work.inputs, *work.places)
    sums: dict[int, torch.Tensor] = {}
    problems: list[str] = []
    for begin in range(0, rows, step):
        part = work.call(*[x[begin : begin + step] for x in work.inputs], *merged)
        for number, (a, b) in enumerate(zip(whole, part, strict=True)):
            axis = _cut(a, b)
            if axis is None:
                sums[number] = sums.get(number, 0) + b.double()
                continue
            first = begin * a.shape[axis] // rows
            there = a.narrow(axis, first, b.shape[axis])
            if not (torch.equal(there, b) if exact else _near(there, b, _NEAR)):
                problems.append(f"result {number} differs in the slice from row {begin} on")
    for number, total in sums.items():
        if not _near(whole[number], total, _SUM if exact else _NEAR):
            problems.append(f"result {number}, a sum, differs")
    for number, (a, b) in enumerate(zip(work.places, merged, strict=True)):
        if not _merged_alike(a, b):
            problems.append(f"what is merged into place {number} differs: {a} and {b}")
    return problems


def _cut(whole: torch.Tensor, part: torch.Tensor) -> int | None:
    """The axis along which a slice gives a part of the result; None if it gives a term of a sum."""
    pairs: Sequence[tuple[int, int]] = list(zip(whole.shape, part.shape, strict=True))
    return next((axis for axis, (a, b) in enumerate(pairs) if a != b), None)


def _merged_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two merged values agree: rows of moments, or amaxes."""
    if a.numel() < len(MOMENTS):
        return torch.equal(a, b)
    near = torch.isclose(a, b, rtol=_MERGED, atol=_MERGED)
    same = a == b
    same[_MEAN], same[_SUMS] = near[_MEAN], near[_SUMS]
    return bool(same.all())


def _near(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    x, y = a.float(), b.float()
    return bool(((x - y).abs().max() <= bound * y.abs().max()).item())
