"""Checks of arguments that have a single supported value."""

from __future__ import annotations

from typing import Any

import torch


def refuse_others(op: str, **arguments: tuple[Any, Any]) -> None:
    """Raise NotImplementedError for any `name=(value, supported value)` whose values differ."""
    for name, (value, only) in arguments.items():
        if value != only:
            raise NotImplementedError(
                f"[{op}] expected {name}={only!r}, the only one that is implemented, got {value!r}"
            )


def check_factor(op: str, factor: object) -> None:
    """Raise TypeError unless the factor of gradients is a tensor or None."""
    if not (factor is None or isinstance(factor, torch.Tensor)):
        raise TypeError(
            f"[{op}] expected grad_factor to be a tensor of one value on the device, got {factor!r}"
        )
