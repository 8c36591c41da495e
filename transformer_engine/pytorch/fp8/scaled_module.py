"""Modules with FP8 scaling state, as checkpointing, CUDA graphs and state dicts need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch._torch_private import (
    constant_in_graphs,
    real_object,
    refuse_scripting,
)
from transformer_engine.pytorch.fp8 import extra_state
from transformer_engine.pytorch.fp8.autocast_stack import Step, autocast_stack
from transformer_engine.pytorch.fp8.extra_state import OptionalExtraState
from transformer_engine.pytorch.fp8.meta import Fp8Meta, last_scope
from transformer_engine.pytorch.fp8.process_state import Scope, process_state
from transformer_engine.pytorch.fp8.recipe_quantizers import check_columns, state_of
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.fp8.scaling_state import (
    BACKWARD,
    FORWARD,
    ScalingGroup,
    ScalingState,
)


class ScaledModule(OptionalExtraState, nn.Module):
    """Base of the modules with GEMMs and of DotProductAttention.

    Args:
        gemms: how many GEMMs have columns in its scaling state, see `recipe_quantizers.py`.
    """

    name: str
    module_type = ""  # in a `QuantizerRole`
    joint_state = False  # its FP8 state is that of several layers side by side
    __prepare_scriptable__ = refuse_scripting

    def __init__(self, gemms: int) -> None:
        super().__init__()
        self.gemm_count = gemms
        self.scaling: dict[str, ScalingState] = {}  # by direction; empty before delayed scaling
        self.in_foreign_region = False  # see `recompute.module_calls.is_recompute`

    @property
    def gemm_names(self) -> Sequence[str]:
        """Names of the module's GEMMs."""
        return (self.name,)

    def __getstate__(self) -> dict[str, Any]:
        process_state().flush()  # run deferred updates now, because copies are in no group
        return self.__dict__

    def updates(self, scope: Scope) -> bool:
        """Whether a step of this module in this scope ends with an update of scales."""
        return scope.enabled and rules_of(scope.recipe).keeps_state

    def take_backward_end(self) -> Step | None:
        """The step that ends with the backward of this call; see `AutocastStack`."""
        stack = autocast_stack()
        if stack.step.first_pending and self.updates(stack.scope):
            return stack.take_backward_end()
        return None

    def drop_plans(self) -> None:
        """Drop plans that point to scaling state which has moved; the base class knows none."""

    @constant_in_graphs
    def make_compiled_state(
        self,
        device: torch.device,
        kind: type[Recipe],
        fields: tuple[tuple[str, Any], ...],
        process_group: Any,
        leaves_amaxes: bool,
    ) -> int:
        """Make the scaling state of compiled calls. Dynamo calls this while it traces.

        If the graph made it, that would be a side effect, and the next call would be compiled
        again. All modules must use this: if one had a side effect, Dynamo would undo this call.

        Args:
            device: device of the state.
            kind: class of the recipe. A recipe that is made in the graph does not exist yet.
            fields: names and values of the recipe's fields.
            process_group: process group of the scope.
            leaves_amaxes: see `states_of`.

        Returns:
            The number of the scaling group, `ScalingGroup.compiled`; 0 for calls of any group.
        """
        recipe = object.__new__(kind)
        vars(recipe).update(fields)
        group = None
        if leaves_amaxes:
            group = process_state().compiled_group(recipe, real_object(process_group))
            self._leave_groups(group)
        for direction in (FORWARD, BACKWARD):
            if state_of(self, recipe, direction, device, group, leaves_amaxes)[1]:
                self.drop_plans()
        return 0 if group is None else group.compiled

    def _leave_groups(self, group: ScalingGroup) -> None:
        """Prepare the move of the states from their groups to `group`, one of compiled code."""
        left = dict.fromkeys([state.group for state in self.scaling.values()])
        if any([own not in (None, group) for own in left]):
            process_state().flush()  # pending updates follow the rules of the groups being left
        for own in left:
            # Move all modules of an eager group: layers that are compiled one by one share a graph.
            if (
                own is not None
                and not own.compiled
                and own.is_of(group.recipe, group.process_group)
            ):
                group.absorb(own)

    def get_extra_state(self) -> torch.Tensor:
        """FP8 scaling state as a uint8 tensor of fixed layout; empty where there is none."""
        process_state().flush()
        return extra_state.pack(self.scaling)

    def set_extra_state(self, state: Any) -> None:
        """Restore FP8 scaling state; None and empty tensors leave it as it is."""
        self.restore_scaling(extra_state.unpack(state, self.name))

    def restore_scaling(self, restored: dict[str, ScalingState]) -> None:
        """Take over a loaded state, if there is any.

        Device and group stay as they are, because they are guards of graphs: so the graphs need not
        be compiled again.
        """
        check_columns(restored, self.gemm_count, self.name)
        if not restored:
            return
        for direction, state in restored.items():
            before = self.scaling.get(direction)
            if before is None or before.room.is_meta:
                continue
            state.fit(state.length, before.room.device)
            if before.group is not None:
                before.group.add(state)
        self.scaling = restored
        self.drop_plans()

    def reset_fp8_meta_tensors(self) -> None:
        """Set scales of delayed scaling to 1 and amaxes to 0, as in a module that never ran.

        They are written in place, so that captured CUDA graphs read the new values. Modules inside
        of this one, such as the attention of a layer, have methods of their own.
        """
        process_state().flush()
        own: Any = self
        for part in own.parts() if self.joint_state else (self,):
            for state in part.scaling.values():
                state.reset()

    @property
    def fp8_meta(self) -> Fp8Meta:
        """Recipe, scales and amaxes, to be read under the names that `Fp8Meta` lists."""
        return Fp8Meta(self)

    @property
    def fp8(self) -> bool:
        """Whether calls made now are in a region that quantises."""
        return autocast_stack().scope.enabled

    @property
    def fp8_calibration(self) -> bool:
        """Whether calls made now are in a region that only records amaxes."""
        return autocast_stack().scope.calibrating

    @property
    def fp8_initialized(self) -> bool:
        """Whether the module has run in FP8, or has the scales of one that has."""
        return bool(self.scaling) or last_scope(self) is not None

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Does nothing: FP8 state is made when it is first needed.

        Args:
            num_gemms: without effect.
        """
