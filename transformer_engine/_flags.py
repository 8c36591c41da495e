"""Which values are accepted where True or False is expected."""

from __future__ import annotations

import numbers


def is_flag(value: object) -> bool:
    """Whether a value is True or False, or what scripts use instead: 0, 1, None, NumPy's bools.

    Other objects that equal True, such as tensors of one element, are not flags.
    """
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, numbers.Integral):
        return value in (0, 1)
    return type(value).__name__ in ("bool", "bool_")  # NumPy is not imported here


def checked_flag(op: str, name: str, value: object, hint: str = "") -> bool:
    """The argument as a bool. Raises TypeError, which ends with the hint, unless it is a flag."""
    if not is_flag(value):
        raise TypeError(f"[{op}] expected {name} to be True or False, got {value!r}{hint}")
    return bool(value)
