"""Checks of the arguments of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from transformer_engine.pytorch.module.arguments import check_numbers, refuse_others


def refuse_settings(group: Mapping[str, Any], bias_correction: bool) -> None:
    """Raise NotImplementedError if a group has settings that must be those of the optimizer."""
    only = {"amsgrad": False, "maximize": False, "bias_correction": bias_correction}
    refuse_others("FusedAdam", None, group, only)


def check_factor(factor: object) -> None:
    """Raise TypeError unless the factor is a tensor or None, ValueError for several values."""
    if not (factor is None or isinstance(factor, torch.Tensor)):
        raise TypeError(
            "[FusedAdam] expected grad_factor to be a tensor of one value on the device, got"
            f" {factor!r}"
        )
    if factor is not None and factor.numel() != 1:
        raise ValueError(
            "[FusedAdam] expected grad_factor to be a tensor of one value on the device, got the"
            f" shape {tuple(factor.shape)}"
        )


def check_settings(group: dict[str, Any]) -> None:
    """Raise unless a group's learning rate, eps, weight decay and betas are valid for Adam."""
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"[FusedAdam] expected betas to be a pair of numbers, got {betas!r}")
    factors = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    settings = {**factors, "betas[0]": betas[0], "betas[1]": betas[1]}
    plain = {k: x for k, x in settings.items() if not isinstance(x, torch.Tensor)}
    check_numbers("FusedAdam", None, **plain)
    for name, value in settings.items():
        if name not in plain and value.numel() != 1:
            raise ValueError(
                f"[FusedAdam] expected {name} to be one number, got a tensor of shape"
                f" {tuple(value.shape)}"
            )
    positive = [value >= 0.0 for value in factors.values()]  # False for NaN
    if not all(positive) or not all([0.0 <= beta < 1.0 for beta in betas]):
        raise ValueError(
            "[FusedAdam] expected lr, eps and weight_decay of 0 or more and betas in [0, 1), got"
            f" {factors} and {betas}"
        )


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step, which computes the gradients, and return its loss, if any."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
