"""Names of cases: what tells them from the default one."""

from typing import Any


def of_case(case: Any) -> str:
    """Of an instance of a dataclass that has defaults for all of its fields."""
    default = type(case)()
    changed = [f"{k}={v}" for k, v in vars(case).items() if v != getattr(default, k)]
    return " ".join(changed).replace("torch.", "") or "default"
