"""Small helpers that training scripts import from here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from transformer_engine.pytorch.fp8.availability import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
)
from transformer_engine.pytorch.module.parameters import default_init_method

__all__ = [
    "divide",
    "get_cudnn_version",
    "get_default_init_method",
    "get_device_compute_capability",
    "init_method_normal",
    "is_bf16_compatible",
    "nvtx_range_pop",
    "nvtx_range_push",
    "round_up_to_nearest_multiple",
    "scaled_init_method_normal",
]


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An `init_method`: normal with mean 0 and the given standard deviation.

    >>> init_method_normal(0.02)(torch.empty(4, 4)).shape
    torch.Size([4, 4])
    """
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(
    sigma: float, num_layers: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An `output_layer_init_method`: the deviation is divided by `sqrt(2 * num_layers)`."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def get_default_init_method() -> Callable[[torch.Tensor], None]:
    """The `init_method` of layers that are given none: normal with deviation 0.023."""
    return default_init_method


def is_bf16_compatible() -> bool:
    """Whether bf16 runs here; see `transformer_engine.pytorch.is_bf16_available`."""
    return bool(is_bf16_available())


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, which must be an integer.

    Raises:
        ValueError: it is none.

    >>> divide(64, 4)
    16
    """
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"[divide] {numerator} is not divisible by {denominator}")
    return numerator // denominator


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`.

    >>> round_up_to_nearest_multiple(17, 16)
    32
    """
    if multiple < 1:
        raise ValueError(f"[round_up_to_nearest_multiple] expected multiple >= 1, got {multiple}")
    return -(-value // multiple) * multiple


def nvtx_range_push(message: str) -> None:
    """Open a range in profiles, where there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(message)


def nvtx_range_pop(message: str | None = None) -> None:
    """Close the range that was opened last.

    Args:
        message: accepted for older callers.
    """
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()
