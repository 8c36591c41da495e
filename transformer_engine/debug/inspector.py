"""`Inspector`: what the modules of `transformer_engine.pytorch` see of the debugger's session."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from transformer_engine.debug.calls import FeatureCalls
from transformer_engine.debug.plans import (
    LayerPlan,
    Plan,
    Planner,
    TensorPlan,
    feature_that_needs_python,
)
from transformer_engine.debug.quantizer import InspectedQuantizer, InspectedResult
from transformer_engine.pytorch.capture import capturing
from transformer_engine.pytorch.quantizers import IDENTITY, GemmQuantizers, Quantizer
from transformer_engine.pytorch.stages.base import Run

if TYPE_CHECKING:
    from transformer_engine.pytorch.modules.base import TransformerEngineBaseModule

_ITERATIONS = 1 << 40
_SESSIONS = itertools.count(1)


class StatisticsProvider(Protocol):
    """Takes statistics without calling features: `manager.statistics`, where there is one.

    Attributes:
        in_captured_graphs: it does so in CUDA graphs too.
    """

    in_captured_graphs: bool

    def attach(
        self, inner: Quantizer, calls: FeatureCalls, features: Sequence[Any]
    ) -> tuple[Quantizer | None, int | None]:
        """Let kernels take what `features` want of a tensor.

        Args:
            inner: the tensor's quantizer; the identity for results of GEMMs.
            calls: the layer, which of its tensors, its parallel group, the iteration.
            features: routed to the tensor, statistics all.

        Returns:
            A copy of `inner` that does so, or None where nothing is due in this iteration; and the
            next iteration in which the answer may differ, None for never.
        """


@dataclass
class Inspection:
    """What was decided about a run, for the ticks in `[begin, end)`."""

    begin: int
    end: int
    first: Run | None  # None: the run stays as it is
    repeated: Run | None  # the same for a forward that is computed again in a backward
    awaited: bool  # graphs must hear of statistics, or of a feature, that are due at another time


class Inspector:
    """One session.

    A tick counts sessions and iterations. Each `Run` of a module keeps the tick from which it may
    be of interest: all that a layer without features pays is one comparison.

    Args:
        manager: of the session; see `nvdlfw_inspect.debug_manager`.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._plans_logged: dict[tuple[str, str, str], Plan] = {}
        self._begin_session()

    def _begin_session(self) -> None:
        self.session = next(_SESSIONS)
        self.iteration = int(self.manager.iteration)
        self.tick = self.session * _ITERATIONS + self.iteration

    def stepped(self) -> None:
        """Follow the manager's count of iterations."""
        iteration = int(self.manager.iteration)
        if iteration < self.iteration:  # set back by hand: what was decided holds no more
            self._begin_session()
        self.iteration = iteration
        self.tick = self.session * _ITERATIONS + iteration

    @property
    def _statistics(self) -> StatisticsProvider | None:
        provider = getattr(self.manager, "statistics", None)
        return provider if hasattr(provider, "attach") else None

    def run_for(self, module: TransformerEngineBaseModule, run: Run) -> Run:
        """The run to use for this call; called when `tick >= run.inspect_at`."""
        found: Inspection | None = run.inspection
        if capturing():
            found = self._captured(module, run)
        elif found is None or not found.begin <= self.tick < found.end:
            found = run.inspection = self._inspect(module, run)
            stays = found.first is None and not found.awaited
            run.inspect_at = found.end if stays else found.begin
        if found.first is None:
            return run
        if torch._C._current_graph_task_id() == -1:
            return found.first
        return found.repeated or run  # inside a backward: a recomputed forward

    def _inspect(self, module: TransformerEngineBaseModule, run: Run) -> Inspection:
        """Ask the features of every layer of the module."""
        provided, names = self._statistics is not None, module.chain.gemm_names
        plans = [
            Planner(self.manager, name, quantizers.fp8, self.iteration, provided).plan()
            for name, quantizers in zip(names, run.quantizers, strict=True)
        ]
        for plan in plans:
            self._log(plan)
        following = [p.next_iteration for p in plans if p.next_iteration is not None]
        attached = [
            self._attach(module, p, q, following)
            for p, q in zip(plans, run.quantizers, strict=True)
        ]
        active = any(p.active for p in plans)
        statistics = any(tensor.statistics for p in plans for tensor in p.tensors.values())
        end = (self.session + 1) * _ITERATIONS
        if following:
            end = self.session * _ITERATIONS + max(min(following), self.iteration + 1)
        if not active and attached == list(run.quantizers):
            awaited = statistics or (bool(following) and self.refusal(names, "", True) is not None)
            return Inspection(self.tick, end, None, None, awaited)
        if any(tensor.calls for plan in plans for tensor in plan.tensors.values()):
            end = self.tick + 1  # features are told the iteration
        first, repeated = (
            self._wrapped(module, run, plans, attached, again) for again in (False, True)
        )
        return Inspection(self.tick, end, first, repeated, statistics)

    def _attach(
        self,
        module: TransformerEngineBaseModule,
        plan: LayerPlan,
        quantizers: GemmQuantizers,
        following: list[int],
    ) -> GemmQuantizers:
        """The quantizers, with statistics where they alone are wanted."""
        changed: dict[str, Quantizer] = {}
        for tensor in plan.tensors.values():
            provider = self._statistics
            if not tensor.statistics or provider is None:
                continue
            name = tensor.tensor.quantizer
            quantizer, next_iteration = provider.attach(
                getattr(quantizers, name), self._calls(module, plan, tensor), tensor.statistics
            )
            if quantizer is not None:
                changed[name] = quantizer
                self._log_statistics(plan.layer, tensor)
            if next_iteration is not None:
                following.append(next_iteration)
        return _with(quantizers, changed)

    def _wrapped(
        self,
        module: TransformerEngineBaseModule,
        run: Run,
        plans: list[LayerPlan],
        attached: list[GemmQuantizers],
        repeated: bool,
    ) -> Run:
        """The run with inspected quantizers; one that is repeated shows nothing a second time."""
        quantizers = []
        for plan, normal, seen in zip(plans, run.quantizers, attached, strict=True):
            changed: dict[str, Quantizer] = {}
            modifies = False
            for tensor in plan.tensors.values():
                about = tensor.tensor
                again = repeated and about.name in ("activation", "weight", "output")
                inner = getattr(normal if again else seen, about.quantizer)
                calls = self._calls(module, plan, tensor, again)
                changed[about.quantizer] = _wrapping(inner, tensor, plan.fp8, calls, run.dtype)
                modifies |= about.is_operand and tensor.modifies
            gemms = _with(normal, changed)
            gemms.fp8 = normal.fp8 or modifies  # tokens are padded where a feature may make FP8
            quantizers.append(gemms)
        result = Run(run.dtype, run.needs, quantizers, run.first_microbatch)
        result.kept = run.kept
        result.recording, result.rehearses = run.recording, run.rehearses
        module.chain.plan(result)
        return result

    def _calls(
        self,
        module: TransformerEngineBaseModule,
        plan: LayerPlan,
        tensor: TensorPlan,
        repeated: bool = False,
    ) -> FeatureCalls:
        return FeatureCalls(
            self.manager,
            plan.layer,
            tensor.tensor,
            self.iteration,
            module.tp_group,
            module.tp_size,
            repeated,
            next(module.parameters()).device,
        )

    def _log(self, plan: LayerPlan) -> None:
        """One line for every side of an operand, again where its plan has changed."""
        for tensor, gemm, how in plan.lines():
            key = (plan.layer, tensor, gemm)
            if self._plans_logged.get(key) is not how:
                self._plans_logged[key] = how
                text = f"Tensor: {tensor}, gemm {gemm} - {how.value}"
                self.manager.log_message(text, plan.layer)

    def _log_statistics(self, layer: str, tensor: TensorPlan) -> None:
        """One line for every feature, when it first takes statistics of a tensor."""
        for routed in tensor.statistics:
            if routed.schedule is None or routed.schedule.due(self.iteration):
                call = getattr(routed.feature, "logged_call", "inspect_tensor")
                text = f"Feature={routed.name}, API={call}: {tensor.tensor.name}"
                self.manager.log_message(text, layer, once=(text, layer))

    def discard(self) -> None:
        """Forget the statistics of this iteration so far: they were about samples."""
        discard = getattr(self._statistics, "discard", None)
        if discard is not None:
            discard()

    def refusal(self, layers: Sequence[str], how: str, captured: bool = False) -> str | None:
        """Why these layers cannot be compiled or captured; None where they can."""
        by_kernels = captured and getattr(self._statistics, "in_captured_graphs", False)
        for layer in layers:
            feature = feature_that_needs_python(self.manager, layer, by_kernels)
            if feature is not None:
                return (
                    f"[inspect] expected a layer without features in {how}, got feature {feature}"
                    f" on layer {layer}: it needs Python in every call; run this layer eagerly"
                )
        return None

    def _captured(self, module: TransformerEngineBaseModule, run: Run) -> Inspection:
        """What a graph that is being captured does in all iterations in which it is replayed."""
        reason = self.refusal(module.chain.gemm_names, "a CUDA graph capture", captured=True)
        if reason is not None:
            raise RuntimeError(reason)
        return self._inspect(module, run)


def _wrapping(
    inner: Quantizer, plan: TensorPlan, fp8: bool, calls: FeatureCalls, dtype: torch.dtype
) -> Quantizer:
    if not plan.active(fp8):
        return inner
    if plan.tensor.is_operand:
        return InspectedQuantizer(inner, plan, calls, dtype)
    return InspectedResult(inner, plan, calls)


def _with(quantizers: GemmQuantizers, changed: dict[str, Quantizer]) -> GemmQuantizers:
    """The same quantizers, or a copy in which some are replaced."""
    names = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")
    changed = {n: q for n, q in changed.items() if q is not getattr(quantizers, n)}
    if not changed:
        return quantizers
    own = {name: getattr(quantizers, name) for name in names}
    copy = GemmQuantizers(**{**own, **changed})
    copy.fp8 = quantizers.fp8
    copy.fast_accumulation = quantizers.fast_accumulation
    copy.wrapped = quantizers.wrapped or any(q is not IDENTITY for q in changed.values())
    return copy
