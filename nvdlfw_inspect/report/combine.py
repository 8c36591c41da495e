"""Merges several pieces of advice into one config.

A config must not apply a feature twice to a tensor of a layer, but pieces of advice may. Here each
layer belongs to one section, which has the features of all pieces that name the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Any

Features = dict[str, dict[str, Any]]
GEMMS = ("fprop", "dgrad", "wgrad")


def combine(pieces: Iterable[tuple[list[str], Features]]) -> list[tuple[list[str], Features]]:
    """Merges (layers, features) pairs so that no layer is in two of them.

    Lists are united. A schedule becomes the union of the schedules; a feature without a schedule in
    one of the pieces has none in the result.
    """
    of_layer: dict[str, Features] = {}
    for layers, features in pieces:
        for layer in layers:
            wanted = of_layer.setdefault(layer, {})
            for name, keys in features.items():
                wanted[name] = _united(wanted[name], keys) if name in wanted else keys
    sections: list[tuple[list[str], Features]] = []
    for layer, features in of_layer.items():
        left = _needed(features)
        same = next((layers for layers, others in sections if others == left), None)
        if same is None:
            sections.append(([layer], left))
        else:
            same.append(layer)
    return sections


def _needed(features: Features) -> Features:
    """Drops features that have no effect on GEMMs in which FP8 is turned off."""
    disabled = features.get("DisableFP8GEMM", {}).get("gemms", [])
    needed = {}
    for name, keys in features.items():
        off = GEMMS if "DisableFP8Layer" in features else disabled
        if name == "PerTensorScaling" or (name == "DisableFP8GEMM" and off is GEMMS):
            left = [gemm for gemm in keys["gemms"] if gemm not in off]
            if left:
                needed[name] = {**keys, "gemms": left}
        else:
            needed[name] = keys
    return needed


def _united(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    united = {key: first.get(key, second.get(key)) for key in {**first, **second}}
    for key, value in united.items():
        if isinstance(value, list):
            both = dict.fromkeys([*first.get(key, []), *second.get(key, [])])
            united[key] = [g for g in GEMMS if g in both] if key == "gemms" else list(both)
    for key, widest in (("start_step", min), ("end_step", max), ("freq", gcd)):
        if key in first and key in second:
            united[key] = widest(first[key], second[key])
        else:
            united.pop(key, None)
    return united
