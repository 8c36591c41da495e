"""Names of test cases: the fields that differ from the default case."""

from typing import Any


def of_case(case: Any) -> str:
    """Returns the name of a dataclass instance, all of whose fields have defaults."""
    default = type(case)()
    changed = [f"{k}={v}" for k, v in vars(case).items() if v != getattr(default, k)]
    return " ".join(changed).replace("torch.", "") or "default"
