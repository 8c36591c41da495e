"""What runs give, or what went wrong in them: the ranks go on together with the next one."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """What it gives, or the text of what it raised."""
    try:
        return run(*arguments)
    except Exception:
        return traceback.format_exc()


def failures(scenarios: Mapping[str, Callable[[int], object]], rank: int) -> dict[str, str]:
    """What each scenario raised on a rank, by name; empty where that is nothing."""

    def passed(run: Callable[[int], object]) -> str:
        run(rank)
        return ""

    return {name: attempt(passed, run) for name, run in scenarios.items()}
