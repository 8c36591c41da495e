"""Scales and amax histories of modules, for recipes that keep state, and their update.

A module owns one `ScalingState` per direction. Modules that run under one recipe and process group
in the same outermost autocast form a `ScalingGroup`. One launch for each direction updates all its
states: the kernel reads a device table of addresses, rebuilt when states or addresses change.
Models that never run together are in different groups, so threads do not share a group.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch._torch_private import keep_address
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.kernels.delayed_scaling import entry, gather_amax, spread
from transformer_engine.pytorch.kernels.library import is_exporting
from transformer_engine.pytorch.parallel.agreement import agree, without_addresses
from transformer_engine.pytorch.parallel.collectives import all_reduce

FORWARD, BACKWARD = "forward", "backward"
ALIGNED = 4  # floats, 16 bytes


def columns_in(room: torch.Tensor, numbers: Sequence[int]) -> list[list[torch.Tensor]]:
    """Scales and amaxes, fp32 `[1]` each, in the memory of a state."""
    return [[room[n, i : i + 1] for n in numbers] for i in (0, ALIGNED)]


class ScalingState:
    """`scale [n]` (ones) and `amax_history [length, n]` (zeros), fp32, of one module and direction.

    Both lie in `room`, fp32 `[n, 4 + length or more]`: a row has a scale, and from byte 16 on its
    history.
    Row 0 of the history collects the amaxes of the running step. Tensors are replaced only by the
    methods below, which increase `version`, so that the group notices. Columns and scales are
    aligned to 16 bytes: the compiler's CUDA graphs copy inputs that are not, and amaxes would be
    written to the copies.
    """

    def __init__(self, direction: str, count: int, length: int, device: torch.device) -> None:
        self.direction = direction
        options: Any = {"dtype": torch.float32, "device": device}
        self.version = 0
        self.group: ScalingGroup | None = None
        self.compiled = 0  # `ScalingGroup.compiled` of the group, or 0; a guard of graphs
        self._place(torch.ones(count, **options), torch.zeros(length, count, **options))

    def _place(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # later steps train with the state, or capture it
                self._place(scale.clone(), amax_history.clone())
            return
        count, self.length = scale.numel(), amax_history.shape[0]
        self.room = spread(scale, amax_history, ALIGNED)
        self.scale = self.room[:, 0]
        self.amax_history = self.room[:, ALIGNED : ALIGNED + self.length].t()
        self.scales = [self.scale[i : i + 1] for i in range(count)]
        self.amaxes: list[torch.Tensor] = [column[:1] for column in self.amax_history.t()]
        if not torch.compiler.is_compiling():
            for view in (self.room, *self.scales, *self.amaxes):
                keep_address(view)

    def columns(self, numbers: Sequence[int]) -> list[list[torch.Tensor]]:
        """The scales of these columns, and the amaxes.

        Programs of torch.export hold all of `room`: torch does not save parts of a GPU tensor.
        """
        if is_exporting():
            return columns_in(self.room, numbers)
        return [[of[n] for n in numbers] for of in (self.scales, self.amaxes)]

    def __deepcopy__(self, memo: object) -> ScalingState:
        # Copying the attributes one by one would make separate tensors of the views.
        return state_with(self.direction, self.scale.clone(), self.amax_history.clone())

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as numbers: spawned processes get tensors through files, which close when the
        # clones are freed. The next call of the module moves the copy to the device of that call
        # and lets it join a group.
        if self.room.is_meta:
            return ScalingState, (self.direction, len(self.scales), self.length, self.room.device)
        return _state_from, (self.direction, self.scale.tolist(), self.amax_history.tolist())

    def replace(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Replace the values: loaded ones, or for another device or history length."""
        self._place(scale, amax_history)
        self.version += 1

    def fit(self, length: int, device: torch.device) -> bool:
        """Fit the state to a history length and device, and return whether it has moved.

        The newest rows are kept.
        """
        if self.room.device == device and self.length == length:
            return False
        if self.room.device != device:
            if self.room.is_meta:  # a state on meta has no values to keep
                self.replace(
                    torch.ones_like(self.scale, device=device),
                    torch.zeros_like(self.amax_history, device=device),
                )
            self.replace(self.scale.to(device), self.amax_history.to(device))
        if self.length != length:
            self.replace(self.scale, of_length(self.amax_history, length))
        return True

    def restore(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Write values in place, where CUDA graphs read them; the history's length may differ."""
        self.scale.copy_(scale)
        self.amax_history.copy_(of_length(amax_history, self.length))

    def reset(self) -> None:
        """Set scales to one and the history to zero, in place."""
        self.scale.fill_(1.0)
        self.amax_history.zero_()


def of_length(history: torch.Tensor, length: int) -> torch.Tensor:
    """A history with `length` rows. Row 0 is the running step, then come oldest to newest."""
    if history.shape[0] == length:
        return history
    made = history.new_zeros(length, history.shape[1])
    made[0] = history[0]
    rows_to_copy = min(length, history.shape[0]) - 1
    if rows_to_copy:
        made[length - rows_to_copy :] = history[history.shape[0] - rows_to_copy :]
    return made


def state_with(direction: str, scale: torch.Tensor, amax_history: torch.Tensor) -> ScalingState:
    """A state with these values."""
    length, count = amax_history.shape
    state = ScalingState(direction, count, length, scale.device)
    state.replace(scale, amax_history)
    return state


def _state_from(
    direction: str, scale: list[float], amax_history: list[list[float]]
) -> ScalingState:
    made = [torch.tensor(values, dtype=torch.float32) for values in (scale, amax_history)]
    return state_with(direction, *made)


@dataclass(slots=True)
class StateTable:
    """The table of the states on one device, which the kernels read.

    Attributes:
        rows: int64 `[states, 6]`, see `kernels/delayed_scaling.py`.
        columns: number of columns, which are amax histories, of all states.
        states: the states and their versions. References rather than ids, because a new state may
            have the id of a dead one.
        agreed: the ranks have compared how many scales their states have.
    """

    rows: torch.Tensor
    columns: int
    states: list[tuple[weakref.ref[ScalingState], int]]
    agreed: bool = False


class ScalingMembers:
    """The live states of a group in one direction, and their tables, one for each device."""

    def __init__(self, group: ScalingGroup, direction: str) -> None:
        self.recipe = group.recipe
        self.process_group = group.process_group
        self.direction = direction
        self._group = weakref.ref(group)
        self._states: list[weakref.ref[ScalingState]] = []
        self._tables: dict[torch.device, StateTable] = {}
        self._alike: set[tuple[int, ...]] = set()  # counts of scales that ranks agreed on

    @property
    def fp8_max(self) -> float:
        """The largest value of the recipe's format in this direction."""
        span: Any = self.recipe.fp8_format.value
        return span.max_fwd if self.direction == FORWARD else span.max_bwd

    def add(self, state: ScalingState) -> None:
        """Add a state."""
        self._states.append(weakref.ref(state))

    def alive(self) -> list[ScalingState]:
        """The states that still exist, in the order in which they were added."""
        group = self._group()
        states = {id(s): s for ref in self._states if (s := ref()) and s.group is group}
        if len(states) != len(self._states):
            self._states = [weakref.ref(state) for state in states.values()]
        return list(states.values())

    def table(self, states: list[ScalingState]) -> StateTable:
        """The table of these states, which are on one device."""
        device = states[0].scale.device
        seen = [(weakref.ref(state), state.version) for state in states]
        table = self._tables.get(device)
        if table is None or seen != table.states:
            if is_capturing():
                raise RuntimeError(
                    "[delayed_scaling] the FP8 modules of this autocast changed inside a CUDA "
                    "graph capture; run one step with the same modules before capturing"
                )
            rows = [entry(state.scale, state.amax_history) for state in states]
            on_device = torch.tensor(rows, dtype=torch.int64).to(device)
            table = StateTable(on_device, sum(row[3] for row in rows), seen)
            self._tables[device] = table
        return table

    def update(self) -> None:
        """End a step: compute scales from histories, and roll the histories.

        States whose modules did not run have zeros in row 0, and the kernel leaves them alone.
        """
        by_device: dict[torch.device, list[ScalingState]] = {}
        for state in self.alive():
            by_device.setdefault(state.scale.device, []).append(state)
        rules = rules_of(self.recipe)
        for states in by_device.values():
            rules.update_scales(self, states, self._reduced_amax(states))

    def _reduced_amax(self, states: list[ScalingState]) -> torch.Tensor | None:
        """Row 0 of all states, maximum over the ranks of the group; None on a single rank."""
        if not (self.recipe.reduce_amax and dist.is_available() and dist.is_initialized()):
            return None
        if dist.get_world_size(self.process_group) <= 1:  # -1 for processes outside of the group
            return None
        table = self.table(states)
        if not table.agreed:
            self._agree([len(state.scales) for state in states])
            table.agreed = True
        amaxes = gather_amax(table.rows, table.columns, None, "most_recent")
        return all_reduce(amaxes, self.process_group, "max").wait()

    def _agree(self, scales: list[int]) -> None:
        """Raise RuntimeError on all ranks if they are about to reduce different numbers of amaxes.

        A number on which they agreed once is not compared again.
        """
        if tuple(scales) in self._alike:
            return
        facts = {
            "recipe": without_addresses(self.recipe),
            "FP8 modules": len(scales),
            "scales of them": scales,
        }
        agree("autocast", [self.process_group], f"the end of a {self.direction} in FP8", facts)
        self._alike.add(tuple(scales))


class ScalingGroup:
    """States of modules that run together; see the top of this file.

    `compiled` is a number, not 0, if the modules are in compiled code; they stay in the group.
    """

    def __init__(self, recipe: Any, process_group: Any, compiled: int = 0) -> None:
        self.recipe = recipe
        self.process_group = process_group
        self.compiled = compiled
        self.members = {way: ScalingMembers(self, way) for way in (FORWARD, BACKWARD)}
        self._absorbed_by: ScalingGroup | None = None

    @property
    def current(self) -> ScalingGroup:
        """The group that has this one's states now. Steps need it when their backward ends."""
        return self if self._absorbed_by is None else self._absorbed_by.current

    def is_of(self, recipe: Any, process_group: Any) -> bool:
        """Whether modules that run under these may be in the group."""
        return bool((self.recipe, self.process_group) == (recipe, process_group))

    def add(self, state: ScalingState) -> None:
        """Add a state, and remove it from the group that it was in."""
        if state.group is not self:
            state.group, state.compiled = self, self.compiled
            self.members[state.direction].add(state)

    def absorb(self, other: ScalingGroup) -> None:
        """Move all states of another group with the same recipe and process group to this one."""
        for members in other.members.values():
            for state in members.alive():
                self.add(state)
        other._absorbed_by = self

    def update(self, direction: str) -> None:
        """End a step in a direction."""
        self.members[direction].update()
