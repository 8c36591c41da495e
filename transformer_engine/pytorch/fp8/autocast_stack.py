"""The stack of autocast scopes of each thread and asyncio task, and the updates of scales.

A `Scope` is frozen; entering an autocast pushes one, leaving it pops it. Modules look at the top of
the stack in forward; backward uses what forward recorded. The outermost autocast is a `Step`:
leaving it updates the scales of forward tensors of the modules that ran in it. Scales of gradients
are updated at the end of the backward of the first of these modules.

Eager code keeps the stack in a context variable and replaces it when a scope is entered, so that
threads and tasks do not see each other's scopes. Dynamo cannot trace context variables: compiled
code finds the same stack in a `threading.local`, changes it in place and restores it. Where tasks
of one thread interleave within their autocasts, compiled code sees the scope entered last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import graph_task
from transformer_engine.pytorch.fp8.process_state import (
    OUTSIDE,
    Scope,
    process_state,
    reset_process_state,
)
from transformer_engine.pytorch.fp8.recompute_regions import RecomputeRegion, in_first_forward
from transformer_engine.pytorch.fp8.scaling_state import (
    BACKWARD,
    FORWARD,
    ScalingGroup,
    ScalingState,
)
from transformer_engine.pytorch.kernels.library import is_exporting


class Step:
    """The outermost autocast, with the scaling groups that it will update.

    Attributes:
        first_pending: autograd has not recorded any eager module in it yet.
        groups: scaling groups of the modules that ran in it, by the key of their scope.
        scopes: the scopes entered in it whose recipes keep state.
    """

    def __init__(self, first_pending: bool = False) -> None:
        self.first_pending = first_pending
        self.groups: dict[int, ScalingGroup] = {}
        self.scopes: list[Scope] = []

    def join(self, scope: Scope, states: dict[str, ScalingState]) -> None:
        """Add the states of a module that runs to the group of the modules before it."""
        group = self.groups.get(scope.key)
        if group is not None:
            group = group.current  # compiled code may have absorbed it in this step
        for state in states.values():
            own = state.group
            if state.scale.is_meta or own is group is not None:
                continue
            if own is not None and own.compiled:  # the state stays in a group of compiled code
                if not own.is_of(scope.recipe, scope.group):
                    process_state().join_compiled(scope, [state])
                continue
            if own is not None and not own.is_of(scope.recipe, scope.group):
                own = None
            if group is None:
                group = own or process_state().new_group(scope.recipe, scope.group)
                self.groups[scope.key] = group
            if own is None:
                group.add(state)
            elif own is not group:
                group.absorb(own)

    def update(self, direction: str) -> None:
        """Update the scales of all groups in a direction; an error does not stop other groups."""
        groups = [*self.groups.values()]
        if compiled := process_state().compiled_groups:
            found = [compiled.get((scope.recipe, scope.group)) for scope in self.scopes]
            groups += filter(None, found)
        errors = []
        for group in dict.fromkeys([group.current for group in groups]):
            try:
                group.update(direction)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def end_backward(self) -> None:
        """Update the scales of gradients."""
        self.update(BACKWARD)


class AutocastStack:
    """The scopes that a thread or task has entered.

    Attributes:
        scope: the innermost scope.
        step: the step of the outermost scope.
        outer: the scopes around `scope`, outermost first.
        entered_in_graph: the outermost scope was entered in compiled code.
        in_compiled_checkpoint: the code that is being compiled is in a checkpoint of its graph.
        in_backward: the outermost scope was entered in a backward.
        regions: recompute regions whose first forward is running, outermost first.
        recomputed: the recompute region whose recompute is running, or None.
        model_inits: scopes of `quantized_model_init`.
        exporting: the code runs within an enabled `onnx_export`.
        warms_up: this is the warm-up before the capture of a CUDA graph.
        before: the stack to restore when the scope is left; None for the stack outside of scopes.
    """

    def __init__(self) -> None:
        self.scope = OUTSIDE
        self.step = Step()
        self.outer: list[Scope] = []
        self.entered_in_graph = False
        self.in_compiled_checkpoint = False
        self.in_backward = False
        self.regions: tuple[RecomputeRegion, ...] = ()
        self.recomputed: RecomputeRegion | None = None
        self.model_inits: tuple[Any, ...] = ()
        self.exporting = False
        self.warms_up = False
        self.before: AutocastStack | None = None

    @property
    def exports_inference(self) -> bool:
        """Whether this call is traced for an inference program that any process or runtime can run.

        A program of torch.export is one if gradients are off while it is traced. Else it also
        computes gradients, by operators that only this process knows.
        """
        return is_exporting() and (self.exporting or not torch.is_grad_enabled())

    @property
    def flushes(self) -> bool:
        """Whether calls first run the deferred updates of scales.

        Compiled calls do so if the autocast was entered in compiled code, too. Programs for
        inference do not: they run where there is nothing to update.
        """
        return (
            self.entered_in_graph and torch.compiler.is_compiling() and not self.exports_inference
        )

    def push(self, scope: Scope) -> None:
        """Enter a scope."""
        if not self.outer:
            self.entered_in_graph = torch.compiler.is_compiling()
            self.in_backward = not self.entered_in_graph and graph_task() != -1
            if self.entered_in_graph:
                self.step.first_pending = True
            else:
                if not self.in_backward:
                    process_state().flush()
                self.step = Step(first_pending=not self.in_backward)
        self._push(scope)

    def _push(self, scope: Scope) -> None:
        self.outer.append(self.scope)
        self.scope = scope
        if scope.key >= 0:
            self.step.scopes.append(scope)

    def pop(self, failed: bool = False) -> None:
        """Leave the innermost scope; leaving the outermost one ends the step of the forward.

        In compiled code leaving any scope requests an update, if the outermost one needs any. After
        an exception no scales are updated, because other ranks may not come to reduce amaxes.
        """
        left, compiling = self.scope, torch.compiler.is_compiling()
        self.scope = self.outer.pop()
        if self.outer and not compiling:
            return
        if not self.outer:
            self.step.first_pending = self.entered_in_graph = False
        if self.in_backward or failed or (compiling and self.exports_inference):
            return
        outermost = (*self.outer[1:], self.scope)[0] if self.outer else left
        recorded = torch.is_grad_enabled() or (not compiling and in_first_forward())
        if outermost.calibrating or (outermost.enabled and recorded):
            if compiling:  # the step of an outer scope has no scopes of the graph
                process_state().forward_pending = True
            else:
                self.step.update(FORWARD)

    def copied(self) -> AutocastStack:
        """A copy of the stack."""
        own = AutocastStack.__new__(AutocastStack)
        own.__dict__.update(self.__dict__)
        own.outer = list(self.outer)
        return own

    def join(self, states: dict[str, ScalingState], counts: bool) -> None:
        """Add the states of a module that runs in the innermost scope to the step.

        A call that leaves no amax is ignored: its states would leave the group of an earlier call
        whose backward is still to come. `counts` says whether gradients are on, now or in a
        recompute.
        """
        if not self.scope.leaves_amaxes(counts):
            return
        if self.entered_in_graph:
            process_state().join_compiled(self.scope, states.values())
            process_state().backward_pending = True  # updates are deferred, as in compiled code
            return
        group = self.step.groups.get(self.scope.key)
        for state in states.values():
            if state.group is not group or group is None:
                self.step.join(self.scope, states)
                return

    def take_backward_end(self) -> Step | None:
        """The step, for the first eager call that autograd records in it; None for all later calls.

        The end of that call's backward updates the scales of gradients. A compiled backward writes
        its amaxes when it ends, so for a call in compiled code, or after a graph break in it, the
        update waits for the next step.
        """
        if torch.compiler.is_compiling() or self.entered_in_graph:
            process_state().backward_pending = True
            return None
        self.step.first_pending = False
        return self.step

    @contextmanager
    def resumed(self, scope: Scope) -> Iterator[AutocastStack]:
        """Open a scope again that has ended, without starting or ending a step."""
        own = self.copied()
        own.step = Step()
        own._push(scope)
        before = _CONTEXT.get()
        _use(own)
        try:
            yield own
        finally:
            _use(before)


class _ThreadStacks(threading.local):
    """The stacks of a thread: the one outside of all scopes, and the one for compiled code."""

    def __init__(self) -> None:
        self.outside = self.current = AutocastStack()


_THREAD = _ThreadStacks()
_CONTEXT: ContextVar[AutocastStack | None] = ContextVar("transformer_engine_autocast", default=None)

# Found once: this is on the hot path of every module.
_find, _is_compiling = _CONTEXT.get, torch.compiler.is_compiling


def autocast_stack() -> AutocastStack:
    """The stack of this thread or asyncio task."""
    if _is_compiling():
        return _THREAD.current
    stack = _find() or _THREAD.outside
    if not stack.scope.number and stack.scope is not OUTSIDE:  # after a graph break
        stack.scope = process_state().intern(stack.scope)
    return stack


def _use(stack: AutocastStack | None) -> None:
    """Make this the stack of the context; None stands for the stack outside of all scopes."""
    _CONTEXT.set(stack)
    _THREAD.current = stack or _THREAD.outside


def enter(scope: Scope) -> None:
    """Enter a scope in this thread or task."""
    if torch.compiler.is_compiling():  # such code needs no numbers, and cannot register scopes
        _THREAD.current.push(scope)
    else:
        own = autocast_stack().copied()
        own.push(process_state().intern(scope))
        own.before = _CONTEXT.get()
        _use(own)


def leave(failed: bool = False) -> None:
    """Leave the innermost scope; `failed` says that this is because of an exception."""
    if torch.compiler.is_compiling():
        _THREAD.current.pop(failed)
    else:
        own = autocast_stack()
        if not own.outer:
            raise RuntimeError("[autocast] expected a scope to leave, got none: __exit__ twice?")
        _use(own.before)
        own.pop(failed)


def reset_autocast() -> None:
    """Forget every scope and registration (tests, notebooks); the debugger's session stays."""
    reset_process_state()
    _THREAD.outside = AutocastStack()
    _use(None)
