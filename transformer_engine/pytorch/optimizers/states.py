"""State dicts of `torch.optim.AdamW` and `Adam`, read as those of `FusedAdam`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_engine.pytorch.optimizers.arguments import refuse_others


def steps_of_groups(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with the number of steps in each group, where torch has one per parameter.

    Args:
        state_dict: of either kind; states of parameters that are no dicts stay as they are.

    Raises:
        NotImplementedError: a group with `amsgrad` or `maximize`.
        ValueError: parameters of a group that have taken different numbers of steps.
    """
    states = dict(state_dict["state"])
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        for name in ("amsgrad", "maximize"):
            refuse_others("FusedAdam", **{name: (group.get(name, False), False)})
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
