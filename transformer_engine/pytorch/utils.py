"""Small helpers that training scripts import from here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import tree_leaves, tree_map
from transformer_engine.pytorch.fp8.availability import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
)
from transformer_engine.pytorch.kernels.memory_views import weak_view
from transformer_engine.pytorch.module.parameters import default_init_method

__all__ = [
    "attention_mask_func",
    "cast_if_needed",
    "divide",
    "get_cudnn_version",
    "get_default_init_method",
    "get_device_compute_capability",
    "init_method_normal",
    "is_bf16_compatible",
    "jit_fuser",
    "make_weak_ref",
    "no_torch_dynamo",
    "nvtx_range_pop",
    "nvtx_range_push",
    "requires_grad",
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
        ValueError: it is not an integer, or the denominator is 0.

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


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor in a dtype; None for None.

    >>> cast_if_needed(torch.ones(2), torch.bfloat16).dtype
    torch.bfloat16
    """
    return None if tensor is None else tensor.to(dtype)


def requires_grad(*tensors: Any) -> bool:
    """Whether any argument is a tensor that needs a gradient, also inside lists and tuples.

    >>> requires_grad(None, [torch.ones(2, requires_grad=True)])
    True
    """
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(tensors))


def attention_mask_func(
    attention_scores: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Mask attention scores, in place.

    Args:
        attention_scores: of any floating dtype, `[batch, heads, queries, keys]`.
        attention_mask: bool, broadcast to the scores; True masks a score.

    Returns:
        `attention_scores`, with -10000 where they are masked.

    >>> attention_mask_func(torch.zeros(2), torch.tensor([False, True]))
    tensor([     0., -10000.])
    """
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def make_weak_ref(x: Any) -> Any:
    """Returns tensors on the memory of CUDA tensors, which do not keep that memory alive.

    This is for inputs and outputs of CUDA graphs, whose memory may be reused between replays.

    Args:
        x: a tensor, or any lists, tuples and dicts of tensors.

    Returns:
        The same structure. Tensors on other devices and other objects are returned as they are.

    Example, on a GPU:

        static = make_weak_ref(graph_input)
        del graph_input  # the memory goes back to the pool of the graph
    """
    return tree_map(lambda t: weak_view(t) if getattr(t, "is_cuda", False) else t, x)


def no_torch_dynamo(recursive: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: torch.compile leaves its graph for calls of the function.

    Args:
        recursive: also for what the function calls.
    """
    return functools.partial(torch.compiler.disable, recursive=recursive)


def jit_fuser(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: compile the function with torch.compile at its first call."""
    return torch.compile(function)


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
