"""Runs scenarios and returns failures as text, so that all ranks continue with the next one."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of `run`, or the traceback of the exception that it raised."""
    try:
        return run(*arguments)
    except Exception:
        return traceback.format_exc()


def failures(scenarios: Mapping[str, Callable[[int], object]], rank: int) -> dict[str, str]:
    """Returns for each scenario the traceback of its exception on this rank, "" where it passed."""

    def passed(run: Callable[[int], object]) -> str:
        run(rank)
        return ""

    return {name: attempt(passed, run) for name, run in scenarios.items()}
