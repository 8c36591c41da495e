"""Checks and conversion of state dicts that `FusedAdam` loads, also from torch's Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from transformer_engine.pytorch.optimizers.arguments import refuse_settings
from transformer_engine.pytorch.optimizers.stored_states import STATES


@contextmanager
def fp32_states(
    optimizer: Any, overwrite: Callable[[torch.Tensor, str, torch.Tensor], None]
) -> Iterator[None]:
    """Let `torch.optim.Optimizer.load_state_dict` take state dicts of both kinds, and keep fp32.

    Hooks do this after the program's own hooks for state dicts, and before those for the result.
    `overwrite` replaces a tensor of a parameter's state by a value, without a cast.
    """
    loaded: dict[str, Any] = {}

    def convert(_: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        loaded.update(steps_of_groups(state_dict, optimizer.bias_correction))
        check_shapes(optimizer.param_groups, loaded)
        return loaded

    def overwrite_all(_: Any) -> None:
        for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for name, value in loaded["state"].get(number, {}).items():
                    if isinstance(value, torch.Tensor):
                        optimizer.state[parameter].pop(name)
                        overwrite(parameter, name, value)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(convert),
        optimizer.register_load_state_dict_post_hook(overwrite_all, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def steps_of_groups(state_dict: Mapping[str, Any], bias_correction: bool) -> dict[str, Any]:
    """Convert a state dict with one `step` per parameter, as torch's, to one `step` per group.

    States of parameters that are not dicts stay as they are.

    Raises:
        NotImplementedError: a group with `amsgrad`, `maximize` or another `bias_correction`.
        ValueError: parameters of a group that have taken different numbers of steps.
    """
    states = dict(state_dict["state"])
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        refuse_settings(group, bias_correction)
        found = set()
        for number in group["params"]:
            state = states.get(number)
            if isinstance(state, Mapping) and "step" in state:
                states[number] = {name: state[name] for name in state if name != "step"}
                found.add(int(state["step"]))
        if len(found) > 1:
            raise ValueError(
                "[FusedAdam] expected a state dict whose parameters of a group have taken equally "
                f"many steps, got {', '.join(map(str, sorted(found)))}"
            )
        if found:
            group["step"] = found.pop()
    return {**state_dict, "state": states, "param_groups": groups}


def check_shapes(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Check the shapes of states, which `copy_` would broadcast; torch checks the groups.

    Raises:
        ValueError: a state of another shape than its parameter, or of another type than dict; an
            entry that is not a tensor under the name of one.
    """
    saved = [group["params"] for group in state_dict["param_groups"]]
    own = [group["params"] for group in groups]
    if [len(numbers) for numbers in saved] != [len(parameters) for parameters in own]:
        return
    for number, parameter in zip(chain(*saved), chain(*own), strict=True):
        state = state_dict["state"].get(number, {})
        if not isinstance(state, Mapping):
            raise ValueError(
                f"[FusedAdam] expected a dict as the state of parameter {number}, got "
                f"{type(state).__name__}"
            )
        for name, value in state.items():
            if name in STATES and not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"[FusedAdam] expected {name} of parameter {number} to be a tensor, got "
                    f"{type(value).__name__}"
                )
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                raise ValueError(
                    f"[FusedAdam] expected shape {tuple(parameter.shape)} for {name} of "
                    f"parameter {number}, got {tuple(value.shape)}"
                )


def portions(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of a list, each with a sum of sizes of at most `most`; larger single ones stand alone.

    >>> list(portions([4, 3, 9, 1], 8))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
