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
