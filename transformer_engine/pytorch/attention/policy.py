"""Which backend is the fastest for a problem, as measured by `benchmarks/bench_attention.py`."""

from __future__ import annotations

from transformer_engine.pytorch.attention.backend import Problem

_ORDER = ("flash4", "cudnn", "flash3", "sdpa", "flash2", "unfused")


def preference(problem: Problem) -> tuple[str, ...]:
    """Names of backends, the fastest first; what is not named comes after."""
    return _ORDER
