"""`Inspector`: decides how a session of the debugger changes the plan of a module's call.

A `CallPlan` has a quantizer for each tensor of each GEMM. The inspector asks the features about
every tensor. Where a feature is due, it wraps the quantizer in one that calls the feature or takes
statistics. It returns a copy of the plan with these quantizers, so layers know nothing of features.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.debug.calls import FeatureCalls
from transformer_engine.debug.names import NAMESPACE, replicated_tensors
from transformer_engine.debug.plans import (
    LayerPlan,
    Plan,
    Planner,
    TensorPlan,
    feature_that_needs_python,
    gemms_in_blocks,
    taken_by_kernels,
)
from transformer_engine.debug.quantizer import wrapping
from transformer_engine.debug.statistics import compiled
from transformer_engine.debug.statistics.quantizer import StatisticsQuantizer
from transformer_engine.pytorch._torch_private import graph_task
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.chain.plan import CLOSED, CallPlan
from transformer_engine.pytorch.fp8.casts.quantizers import SIX, GemmQuantizers, Quantizer
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.kernels.library import is_exporting

if TYPE_CHECKING:
    from transformer_engine.debug.statistics.collector import Collector
    from transformer_engine.debug.statistics.tensor import TensorStatistics
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_OF_FORWARDS = ("activation", "weight", "output")
_ITERATIONS = 1 << 40  # iterations are smaller: a tick is session * _ITERATIONS + iteration
_SESSIONS = itertools.count(1)
_NAMES = itertools.count(1)


@dataclass
class Inspection:
    """What the features decided about a plan, valid for ticks in `[begin, end)`."""

    begin: int
    end: int
    first: CallPlan | None  # replaces the plan; None: the plan stays as it is
    recompute: CallPlan | None  # replaces the plan when a checkpoint repeats the forward
    due_later: bool  # something is due in a later iteration: a CUDA graph must include it now
    watching: dict[Hashable, tuple[CallPlan, CallPlan | None]]  # plans that only take statistics
    entered: Sequence[TensorStatistics | FeatureCalls] = ()  # told when a forward begins


class Inspector:
    """Inspects the modules of `transformer_engine.pytorch` during one session.

    A tick is a number that grows with sessions and iterations. Each `CallPlan` of a module has the
    tick from which it must be inspected again, so a layer without features pays for one comparison
    in each call.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.name = f"session {next(_NAMES)}"
        self.selects = bool(getattr(manager, "has_features", True))
        self.feeds: dict[str, compiled.Taker] = {}  # for operators of compiled graphs
        self._plans_logged: dict[tuple[str, str, str], Plan] = {}
        self._owners: dict[str, weakref.ref[TransformerEngineBaseModule]] = {}
        self._begin_session()

    def _begin_session(self) -> None:
        self.session = next(_SESSIONS)
        self.iteration = int(self.manager.iteration)
        self.tick = self.session * _ITERATIONS + self.iteration

    def stepped(self) -> None:
        """Take over the manager's iteration."""
        iteration = int(self.manager.iteration)
        if iteration < self.iteration:  # the program set it back: earlier decisions are void
            self._begin_session()
        self.iteration = iteration
        self.tick = self.session * _ITERATIONS + iteration

    @property
    def statistics(self) -> Collector | None:
        """The collector of built-in statistics; None: no statistics are taken."""
        return getattr(self.manager, "statistics", None)

    def plan_for(self, module: TransformerEngineBaseModule, call: CallPlan) -> CallPlan:
        """Return the plan to use for a call of the module; called if `tick >= call.inspect_at`."""
        try:
            return self._plan_for(module, call)
        except RuntimeError:
            if process_state().inspector is self:
                raise
            return call  # another thread has ended the session meanwhile

    def _plan_for(self, module: TransformerEngineBaseModule, call: CallPlan) -> CallPlan:
        found: Inspection | None = call.inspection
        if is_capturing():
            # The graph does the same in every iteration in which it is replayed.
            self.refuse(module.chain.gemm_names, "a CUDA graph capture", captured=True)
            found = self._inspect(module, call)
        elif found is None or not found.begin <= self.tick < found.end:
            found = call.inspection = self._inspect(module, call)
            stays = found.first is None and not found.due_later
            call.inspect_at = found.end if stays else found.begin
        if found.first is None:
            return call
        if graph_task() == -1:
            evaluating = not (module.training or call.requires_grad or call.in_first_forward)
            for tensor in found.entered:
                tensor.enter(evaluating)
            return found.first
        return found.recompute or call

    def _inspect(self, module: TransformerEngineBaseModule, call: CallPlan) -> Inspection:
        """Ask the features what to do in every layer (GEMM triple) of the module."""
        names = module.chain.gemm_names
        about = zip(names, call.quantizers, gemms_in_blocks(call), strict=True)
        plans = [
            Planner(self.manager, name, quantizers.fp8_gemms, self.iteration, in_blocks).plan()
            for name, quantizers, in_blocks in about
        ]
        for plan in plans:
            self._log(plan)
            if plan.active or any(tensor.statistics for tensor in plan.tensors.values()):
                self._tell_of_shared_name(plan.layer, module)
        following = [p.next_iteration for p in plans if p.next_iteration is not None]
        entered: list[TensorStatistics | FeatureCalls] = []
        attached = [
            self._attach(module, p, q, following, entered)
            for p, q in zip(plans, call.quantizers, strict=True)
        ]
        active = any(p.active for p in plans)
        statistics = any(tensor.statistics for p in plans for tensor in p.tensors.values())
        session = self.session * _ITERATIONS
        end = session + _ITERATIONS
        if following:
            end = session + max(min(following), self.iteration + 1)
        before: Inspection | None = call.inspection
        watching = {} if before is None or before.begin < session else before.watching
        if not active and attached == list(call.quantizers):
            statistics |= bool(following) and self._needing_python(names, True) is not None
            return Inspection(self.tick, end, None, None, statistics, watching)
        key = _watched(attached)
        first, recompute = (None, None) if active else watching.get(key, (None, None))
        if first is None:
            first = self._wrapped(module, call, plans, attached, entered)
            recompute = self._wrapped(module, call, plans, attached, entered, first)
        if any(tensor.calls for plan in plans for tensor in plan.tensors.values()):
            end = self.tick + 1  # `FeatureCalls` holds the iteration
            first.recordings = CLOSED
        elif not active:
            watching[key] = first, recompute
        return Inspection(self.tick, end, first, recompute, statistics, watching, entered)

    def _attach(
        self,
        module: TransformerEngineBaseModule,
        plan: LayerPlan,
        quantizers: GemmQuantizers,
        following: list[int],
        entered: list[TensorStatistics | FeatureCalls],
    ) -> GemmQuantizers:
        """Replace the quantizers of tensors for which built-in statistics are requested.

        `following` receives the iterations at which other statistics may become due, and `entered`
        the statistics of tensors of the forward.
        """
        changed: dict[str, Quantizer] = {}
        for tensor in plan.tensors.values():
            if not tensor.statistics or self.statistics is None:
                continue
            name = tensor.tensor.quantizer
            quantizer, next_iteration = self.statistics.attach(
                getattr(quantizers, name),
                self._calls(module, plan, tensor),
                tensor.statistics,
                module,
            )
            if quantizer is not None:
                by_kernels = [r for r in tensor.statistics if taken_by_kernels(r.feature)]
                if by_kernels:
                    changed[name] = quantizer
                if tensor.tensor.name in _OF_FORWARDS:
                    entered.append(quantizer.statistics)
                self.log_statistics(plan.layer, tensor.tensor.name, by_kernels)
            if next_iteration is not None:
                following.append(next_iteration)
        return quantizers.replaced(changed)

    def _wrapped(
        self,
        module: TransformerEngineBaseModule,
        call: CallPlan,
        plans: list[LayerPlan],
        attached: list[GemmQuantizers],
        entered: list[TensorStatistics | FeatureCalls],
        first: CallPlan | None = None,
    ) -> CallPlan:
        """A copy of a plan whose quantizers call features and take statistics.

        `entered` receives the calls of features for tensors of the forward. With `first`, the plan
        of the first forward, the copy is for the recompute. Features do not see a tensor again
        there. Still, the same GEMMs count as inspected, and the copy is recorded only if `first`
        is, because both forwards must save the same tensors.
        """
        quantizers: list[GemmQuantizers] = []
        is_recompute = first is not None
        likes = [None] * len(plans) if first is None else first.quantizers
        for plan, normal, seen, like in zip(plans, call.quantizers, attached, likes, strict=True):
            changed: dict[str, Quantizer] = {}
            modifies = False
            for tensor in plan.tensors.values():
                about = tensor.tensor
                recomputed = is_recompute and about.name in _OF_FORWARDS
                inner = getattr(normal if recomputed else seen, about.quantizer)
                calls = self._calls(module, plan, tensor, recomputed)
                if about.name in _OF_FORWARDS and not recomputed:
                    entered.append(calls)
                changed[about.quantizer] = wrapping(inner, tensor, plan.fp8, calls, call.dtype)
                modifies |= about.is_operand and tensor.modifies
            gemms = normal.replaced(changed, like is not None and like.wrapped)
            if like is not None and like.wrapped:
                gemms.native = like.native
            if modifies:
                gemms.pads = True  # features may return FP8 operands
            quantizers.append(gemms)
        return call.chain.prepare(call.with_quantizers(quantizers))

    def _calls(
        self,
        module: TransformerEngineBaseModule,
        plan: LayerPlan,
        tensor: TensorPlan,
        is_recompute: bool = False,
    ) -> FeatureCalls:
        return FeatureCalls(
            self.manager,
            plan.layer,
            tensor.tensor,
            self.iteration,
            module.tp_group,
            module.tp_size,
            is_recompute,
            _device_of(module),
            tensor.tensor.name in replicated_tensors(module.chain.stages, plan.layer),
        )

    def _log(self, plan: LayerPlan) -> None:
        """Log the plan of each side of an operand, if it is new or has changed."""
        for tensor, gemm, how in plan.lines():
            key = (plan.layer, tensor, gemm)
            if self._plans_logged.get(key) is not how:
                self._plans_logged[key] = how
                text = f"Tensor: {tensor}, gemm {gemm} - {how.value}"
                self.manager.log_message(text, plan.layer)

    def _tell_of_shared_name(self, layer: str, module: TransformerEngineBaseModule) -> None:
        """Warn, once for each name, if another module has the same layer name."""
        owner = self._owners.setdefault(layer, weakref.ref(module))()
        if owner is None:
            self._owners[layer] = weakref.ref(module)
        elif owner is not module:
            text = (
                "[names] expected one layer of each name, got several of this one: their statistics"
                " are logged as those of one layer; give each a name of its own, or call"
                " debug_api.infer_and_assign_layer_names(model)"
            )
            self.manager.log_message(text, layer, logging.WARNING, once=(text, layer))

    def log_statistics(self, layer: str, tensor: str, features: Sequence[Any]) -> list[Any]:
        """Write a line to the debug log, once for every feature that is due for a tensor.

        Returns:
            The features that are not due yet.
        """
        later = []
        for routed in features:
            if routed.schedule is None or routed.schedule.due(self.iteration):
                call = getattr(routed.feature, "logged_call", "inspect_tensor")
                text = f"Feature={routed.name}, API={call}: {tensor}"
                self.manager.log_message(text, layer, once=(text, layer))
            else:
                later.append(routed)
        return later

    def discard(self) -> None:
        """Drop the statistics of this iteration so far: they were taken from sample inputs."""
        if self.statistics is not None:
            self.statistics.discard()

    def refuse(self, layers: Sequence[str], how: str, captured: bool = False) -> None:
        """Raise RuntimeError if a feature of these layers cannot be compiled or captured."""
        found = self._needing_python(layers, captured)
        if found is not None:
            raise RuntimeError(
                f"[inspect] expected a layer without features in {how}, got feature {found[0]} on "
                f"layer {found[1]}: it needs Python in every call; run this layer eagerly"
            )

    def _needing_python(self, layers: Sequence[str], captured: bool) -> tuple[str, str] | None:
        """The first feature, with its layer, that a graph cannot call; None if there is none."""
        by_kernels = captured and self.statistics is not None
        for layer in layers:
            feature = feature_that_needs_python(self.manager, layer, by_kernels)
            if feature is not None:
                return feature, layer
        return None

    def in_graph(
        self,
        module: TransformerEngineBaseModule,
        quantizers: Sequence[GemmQuantizers],
        device: torch.device,
        dtype: torch.dtype,
    ) -> Sequence[GemmQuantizers]:
        """Return the quantizers of a module for a graph that is being traced; runs under the trace.

        Raises:
            RuntimeError: a feature that needs Python is selected for a layer of the module.
        """
        if not self.selects:  # reading the names of layers would make them guards of the graph
            return quantizers
        found, ranks = [], (module.tp_group, module.tp_size)
        evaluating = not (module.training or torch.is_grad_enabled())
        for name, own in zip(module.chain.gemm_names, quantizers, strict=True):
            replicated = replicated_tensors(module.chain.stages, name)
            facts = (name, device, dtype, self.name, evaluating, *ranks, replicated)
            about = compiled.LayerInGraph(*facts)
            found.append(compiled.traced(about, own))
        return found

    def enter_graph(self, layer: str, fp8: Sequence[str]) -> None:
        """Called when a layer is compiled; `fp8` are the GEMMs that its recipe runs in FP8.

        Raises:
            RuntimeError: a feature that needs Python is selected for the layer.
        """
        # An exported program runs without a session.
        self.refuse((layer,), "a compiled graph", captured=not is_exporting())
        if self.statistics is not None:
            self._log(Planner(self.manager, layer, fp8, self.iteration).plan())

    def statistics_of(
        self,
        layer: str,
        tensor: str,
        device: torch.device,
        tp_group: Any,
        tp_size: int,
        replicated: bool,
    ) -> tuple[Any, Sequence[Any]]:
        """Return the `TensorStatistics` of a tensor (None if never due) and its features."""
        features = self.manager.route(NAMESPACE, layer, "inspect_tensor_enabled", tensor)
        if not features or self.statistics is None:
            return None, ()
        ranks = (tp_group, tp_size, replicated)
        return self.statistics.tensor(layer, tensor, device, *ranks), features

    def shown(
        self, feed: str, x: torch.Tensor | None, rowwise: compiled.Parts, columnwise: compiled.Parts
    ) -> None:
        """Called by a compiled graph when it runs; see `fp8.inspector.show_to_inspector`."""
        if feed in self.feeds:
            self.feeds[feed].take(x, rowwise, columnwise)


def _device_of(module: TransformerEngineBaseModule) -> torch.device:
    """Return the device of the parameters, which are plain tensors in a flat parameter of FSDP."""
    first: torch.Tensor | None = next(module.parameters(), None)
    if first is None:
        first = next(x for x in module.chain_parameters()[0] if x is not None)
    return first.device


def _watched(attached: Sequence[GemmQuantizers]) -> Hashable:
    """What takes statistics of these quantizers' tensors."""
    six = [getattr(one, name) for one in attached for name in SIX]
    watching = [one for one in six if isinstance(one, StatisticsQuantizer)]
    return tuple([(one.statistics, one.captured) for one in watching])
