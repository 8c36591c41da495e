"""Saves and restores scaling state around a warm-up, also for trainers that capture graphs.

set_capture_start()
saved = save_fp8_tensors([model], recipe)
...                                     # warm up and capture
restore_fp8_tensors([model], saved)
set_capture_end()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

SavedScaling = dict[str, tuple[torch.Tensor, torch.Tensor]]  # scales and histories by direction


def scaled_modules(modules: Iterable[nn.Module]) -> tuple[ScaledModule, ...]:
    """The modules with scaling state among these and their submodules; those with GEMMs first."""
    every = dict.fromkeys(part for module in modules for part in module.modules())
    gemms = [m for m in every if isinstance(m, TransformerEngineBaseModule)]
    parts = [part for module in gemms for part in module.parts()]
    others = [m for m in every if isinstance(m, ScaledModule) and m not in gemms]
    return tuple(dict.fromkeys((*parts, *others)))


def save_scaling(modules: Iterable[ScaledModule]) -> list[SavedScaling]:
    """Copies of the scaling state of each module."""
    return [
        {way: (state.scale.clone(), state.amax_history.clone()) for way, state in m.scaling.items()}
        for m in modules
    ]


def restore_scaling(modules: Iterable[ScaledModule], saved: Sequence[SavedScaling]) -> None:
    """Write the copies back in place, because graphs read there; reset states made since then."""
    for module, copies in zip(modules, saved, strict=True):
        for direction, state in module.scaling.items():
            if direction in copies:
                state.restore(*copies[direction])
            else:
                state.reset()


def save_fp8_tensors(modules: Iterable[nn.Module], recipe: Any = None) -> list[SavedScaling] | None:
    """Copy the FP8 scaling state of modules, for `restore_fp8_tensors`.

    Args:
        modules: the modules, with their submodules.
        recipe: the recipe under which the modules will run.

    Returns:
        The copies; None under a recipe that keeps no state.

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> layer, x = te.Linear(16, 16, device="cpu"), torch.ones(16, 16)
    >>> saved = save_fp8_tensors([layer])
    >>> with te.fp8_autocast():
    ...     loss = layer(x).sum()
    >>> restore_fp8_tensors([layer], saved)
    >>> layer.scaling["forward"].amax_history.any().item()
    False
    """
    if recipe is not None and not rules_of(recipe).keeps_state:
        return None
    process_state().flush()
    return save_scaling(scaled_modules(modules))


def restore_fp8_tensors(
    modules: Iterable[nn.Module], fp8_tensors: Sequence[SavedScaling] | None
) -> None:
    """Restore what `save_fp8_tensors` copied, in place, so that graphs read the restored values.

    Args:
        modules: the modules whose state was copied.
        fp8_tensors: the result of `save_fp8_tensors`.

    Raises:
        ValueError: the number of modules with scaling state has changed.
    """
    if fp8_tensors is None:
        return
    process_state().flush()
    found = scaled_modules(modules)
    if len(found) != len(fp8_tensors):
        raise ValueError(
            f"[restore_fp8_tensors] expected the {len(fp8_tensors)} modules whose state was saved,"
            f" got {len(found)}"
        )
    restore_scaling(found, fp8_tensors)


@contextmanager
def capturing_graphs() -> Iterator[None]:
    """From `set_capture_start` to `set_capture_end`, possibly within another such range."""
    state = process_state()
    before, state.captures_graphs = state.captures_graphs, True
    try:
        yield
    finally:
        state.captures_graphs = before


def set_capture_start() -> None:
    """Announce that the caller begins to warm up and capture CUDA graphs.

    Until `set_capture_end`, attention backends are chosen by their time on the GPU only.
    """
    process_state().captures_graphs = True


def set_capture_end() -> None:
    """Announce that the caller has captured its CUDA graphs."""
    process_state().captures_graphs = False


def is_graph_capturing() -> bool:
    """Whether a CUDA graph is being captured, or the caller is between start and end.

    >>> set_capture_start()
    >>> is_graph_capturing()
    True
    >>> set_capture_end()
    """
    return process_state().captures_graphs or is_capturing()
