"""What counts as a flag."""

from __future__ import annotations

import numbers


def is_flag(value: object) -> bool:
    """Whether a value is True or False, or what scripts have for these: 0, 1, None, NumPy's bools.

    Objects that equal True, such as tensors of one element, are none.
    """
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, numbers.Integral):
        return value in (0, 1)
    return type(value).__name__ in ("bool", "bool_")  # NumPy is not imported here
