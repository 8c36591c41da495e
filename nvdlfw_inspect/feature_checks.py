"""Finds methods of feature classes that nothing calls, which are probably mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_OURS = ("nvdlfw_inspect", "transformer_engine")
_NEAR = 0.85  # cutoff of difflib: names that differ in one or two letters


def slips_of(cls: type, calls: Collection[str]) -> list[str]:
    """Return messages about probable mistakes in the methods of a feature class.

    These are a method without `@api_method` that has the name of a call, an `@api_method` whose
    name is only similar to that of a call, and a method whose `*_enabled` method is missing.
    """
    methods = {
        name: method
        for name in dir(cls)
        if not name.startswith("_")
        and callable(method := getattr(cls, name))
        and str(getattr(method, "__module__", "")).partition(".")[0] not in _OURS
    }
    slips = []
    for name, method in methods.items():
        where = f"{cls.__name__}.{name}"
        if not getattr(method, "is_api", False):
            if name in calls:
                slips.append(f"{where} has no @api_method: nothing calls it")
        elif name not in calls:
            near = difflib.get_close_matches(name, calls, 1, _NEAR)
            if near:
                slips.append(f"{where}: nothing calls it; did you mean {near[0]}?")
        elif f"{name}_enabled" in calls and not hasattr(cls, f"{name}_enabled"):
            slips.append(f"{where} is never called without {name}_enabled, whose default is False")
    return slips
