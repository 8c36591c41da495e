"""`ChainOperator`: a chain of one or several parts that the operators of compiled code run.

A description identifies the chain of an operator, not a module: equal layers share an operator, and
a graph from a cache on disk means the same in another process. All tensors are arguments of each
call, scaling state included. So the quantizers of a recorded plan hold stand-ins in place of
scaling state. If stages run one by one, `CallPlan.bind` makes a plan with the state of that call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.capture import is_host_bound
from transformer_engine.pytorch.chain import segments
from transformer_engine.pytorch.chain.chain import TEMPLATES, Chain, ChainBuilder
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.operator_memory import Places, places_of, reading_of
from transformer_engine.pytorch.chain.plan import CallPlan, joined_plan
from transformer_engine.pytorch.chain.segment import Trace, traced
from transformer_engine.pytorch.chain.stage_by_stage import run_forward
from transformer_engine.pytorch.fp8.compiled_scales import refuse_in_backward
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.recipe_quantizers import StateInMemory, described_gemm

Tensors = Sequence[torch.Tensor | None]
Shapes = Sequence[torch.Size]


class PartFacts(NamedTuple):
    """The constants that describe a part in compiled code, equal for all of its calls.

    Attributes:
        kind: `Chain.kind`.
        dtype: dtype of activations.
        needs: see `CallPlan`.
        gemms: descriptions of the quantizers of each GEMM.
        rooms: number of scaling-state tensors that a call takes: one for the forward and one for
            the backward, or none.
        options: returned by `Stage.describe_options` of the first stage.
        counts: see `CallPlan`.
        flush: a call first runs the updates of scales that compiled code has deferred.
        recomputed: a checkpoint in the graph may recompute the call.
        weights: shapes of the weights of the GEMMs. They are part of the description because an
            operator stores where its saved tensors lie, and that depends on their sizes.
        device: the device. Recordings, and with them the places of saved tensors, are of one.
        dtypes: dtypes of the input and the parameters; under `torch.autocast` they differ from
            `dtype`.
    """

    kind: str
    dtype: torch.dtype
    needs: tuple[bool, ...]
    gemms: tuple[Any, ...] = ()
    rooms: int = 0
    options: tuple[Any, ...] = (None,)
    counts: bool = False
    flush: bool = False
    recomputed: bool = False
    weights: tuple[tuple[int, int], ...] = ()
    device: str = ""
    dtypes: tuple[torch.dtype | None, ...] = ()


class PlacedPart(NamedTuple):
    """A part of an operator.

    Attributes:
        facts: the constants of its calls.
        inputs: numbers of the values that the part reads. Numbers count the values of the call,
            then the values that parts return, in order.
        likes: for each of `inputs`, the number of a value of the call with as many tokens.
    """

    facts: PartFacts
    inputs: tuple[int, ...]
    likes: tuple[int, ...]


class _Trace(NamedTuple):
    """How forwards with certain sizes ran; their backward needs to know this.

    Attributes:
        shapes: shapes of the values that came in.
        places: where the operators find the tensors that they return and read.
        of_segments: the traces that `segments.forward` returned.
        by_stages: for each segment, whether its stages ran one by one.
    """

    shapes: Shapes
    places: Places
    of_segments: Sequence[Trace]
    by_stages: Sequence[bool]


class ChainOperator:
    """One or more parts that run as an operator of compiled code, forward and backward.

    Args:
        values: number of values that come in.
        parts: the parts, in the order in which they run.
        outputs: the values that the operator returns, numbered as in `PlacedPart.inputs`.

    Attributes:
        chain: the chain with the stages of all parts; it belongs to no module.
        needs: see `CallPlan`; first for the values that come in, then for the parameters.
        results: see `Places`.
        reads: for each input and each tensor that a call makes, whether the backward reads it.
    """

    def __init__(self, values: int, parts: Sequence[PlacedPart], outputs: Sequence[int]) -> None:
        self.parts = parts
        self._chains = [TEMPLATES[part.facts.kind] for part in parts]
        self.chain = self._chains[0]
        if len(parts) > 1:
            self.chain = _joined_chain(values, parts, outputs)
        self._needs_of_values = _needs_of_values(values, parts)
        chains = zip(parts, self._chains, strict=True)
        of_parameters = [need for part, c in chains for need in part.facts.needs[c.inputs :]]
        self.needs = (*self._needs_of_values, *of_parameters)
        self.flush = any([part.facts.flush for part in parts])
        self.recomputed = any([part.facts.recomputed for part in parts])
        stages = [chain.steps[0].stage for chain in self._chains]
        self._varies = any([stage.options_vary for stage in stages])
        self.results: Sequence[int] = ()
        self.reads: Sequence[bool] = ()
        self._plans: dict[Any, CallPlan] = {}  # by lengths of histories, and shapes if these matter
        self._traces: dict[Any, _Trace] = {}

    def bound(
        self,
        shapes: Shapes,
        state: Sequence[torch.Tensor],
        staged: bool = False,
        cse_barrier: torch.Tensor | None = None,
    ) -> CallPlan:
        """Make a plan of calls with this scaling state.

        Args:
            shapes: shapes of the values that come in.
            state: memory of the scaling state: for each part that has any, that of the forward and
                that of the backward.
            staged: the call is traced stage by stage, and casts with copies of the scales.
            cse_barrier: see `CallPlan`.
        """
        plans = []
        for (facts, _, likes), chain in zip(self.parts, self._chains, strict=True):
            own, state = state[: facts.rooms], state[facts.rooms :]
            columns, of_gemms, in_memory = None, [None] * len(facts.gemms), None
            if own:
                how = (facts.counts, facts.flush, facts.recomputed if staged else None)
                in_memory = StateInMemory(own[0], own[1], *how)
            if in_memory is not None and of_gemms:
                columns, of_gemms = in_memory.gemm_columns(len(of_gemms))  # type: ignore[assignment]
            gemms = [described_gemm(*one) for one in zip(facts.gemms, of_gemms, strict=True)]
            plan = CallPlan(facts.dtype, facts.needs, gemms)
            plan.columns, plan.cse_barrier = columns, cse_barrier
            stage = chain.steps[0].stage
            plan.options = stage.options_in(facts.options, [shapes[v] for v in likes], in_memory)
            plans.append(chain.prepare(plan))
        if len(plans) == 1:
            return plans[0]
        return joined_plan(self.chain, plans, self._needs_of_values)

    def run_staged(self, inputs: Tensors, state: Sequence[torch.Tensor]) -> Any:
        """Run a call that is traced stage by stage.

        The partitioner of AOTAutograd merges equal casts of two checkpoints. Then it would have to
        save one result of the merged cast and recompute another, which torch 2.15 cannot. It does
        not merge uninitialised tensors, so casts with different `cse_barrier`s stay separate.
        """
        first = inputs[0]
        assert first is not None
        barrier = None
        if self.recomputed:
            barrier = torch.empty(0, dtype=torch.int32, device=first.device)
        plan = self.bound(self._shapes(inputs), state, staged=True, cse_barrier=barrier)
        return call_chain(plan, None, *inputs)

    def _planned(self, shapes: Shapes, state: Sequence[torch.Tensor]) -> CallPlan:
        """The plan of calls that run from recordings; the first of them makes it, untraced."""
        key: Any = lengths_of(state)
        if self._varies:
            key = (key, *shapes)
        plan = self._plans.get(key)
        if plan is None:
            stand_ins = [torch.empty(room.shape, device="cpu") for room in state]
            plan = self._plans[key] = self.bound(shapes, stand_ins)
            plan.state, plan.bind = stand_ins, partial(self.bound, shapes)
        return plan

    def _shapes(self, inputs: Tensors) -> list[torch.Size]:
        return [x.shape for x in inputs[: self.chain.inputs]]  # type: ignore[union-attr]

    def sizes(self, inputs: Tensors) -> tuple[int, ...]:
        """The sizes of all values that come in."""
        return tuple([n for shape in self._shapes(inputs) for n in shape])

    def staged(self, inputs: Tensors) -> bool:
        """Whether a call is traced stage by stage."""
        first = inputs[0]
        assert first is not None
        if self.recomputed or any(isinstance(n, torch.SymInt) for n in self.sizes(inputs)):
            return True
        return not (is_host_bound(first) and first.numel())

    def forward(self, inputs: Tensors, state: Sequence[torch.Tensor]) -> list[Any]:
        """Run the forward. Returns the new tensors: results, and those that the backward reads."""
        if self.flush:
            process_state().flush()
        if state and any(self.needs):
            refuse_in_backward()
            process_state().backward_pending = True  # other code may have run the pending update
        sizes = (*self.sizes(inputs), lengths_of(state))
        trace = self._traces.get(sizes)
        shapes = self._shapes(inputs) if trace is None else trace.shapes
        plan = self._planned(shapes, state)
        with process_state().gemms.apart():
            results, saved, of_segments = segments.forward(plan, tuple(inputs), state)
            if trace is not None and trace.by_stages != _by_stages(of_segments):
                # The backward expects a recorded forward, but the recording does not take these
                # addresses or strides.
                copies = tuple([None if x is None else x.clone() for x in inputs])
                results, saved, of_segments = segments.forward(plan, copies, state)
        if trace is None:
            trace = self._trace_of(inputs, results, saved, of_segments)
            self._traces[sizes] = trace
        made = [*results, *saved]
        return [pick.of(made) for pick in trace.places.picks]

    def shapes_of_forward(self, inputs: Tensors, state: Sequence[torch.Tensor]) -> list[Any]:
        """`forward` for fake tensors: returns tensors of the right shapes and launches nothing."""
        chain = self.chain
        values = [*inputs, *chain.results]
        with process_state().gemms.apart():
            plan = self.bound(self._shapes(inputs), state)
            of_all, saved = traced(None, run_forward(plan, values, 0, len(chain.steps)))
        results = [values[v] for v in chain.outputs]
        trace = self._trace_of(inputs, results, saved, (of_all,))
        # A SymInt has no hash, even if it stands for a constant by now.
        self._traces["shapes", tuple([int(n) for n in self.sizes(inputs)])] = trace
        made = [*results, *saved]
        return [pick.of(made) for pick in trace.places.picks]

    def _trace_of(
        self, inputs: Tensors, results: Sequence[Any], saved: Tensors, of_segments: Sequence[Trace]
    ) -> _Trace:
        """The trace of a call. Also sets `results` and `reads`, which are equal for all sizes."""
        readings = _readings(saved, of_segments) if self.chain.communicates else None
        places = places_of(inputs, results, saved, readings)
        read = {source.number for source in places.sources if source is not None}
        self.results = places.results
        self.reads = [i in read for i in range(len(inputs) + len(places.picks))]
        return _Trace(self._shapes(inputs), places, of_segments, _by_stages(of_segments))

    def backward(
        self,
        sizes: Sequence[int],
        grads: Tensors,
        saved: Tensors,
        state: Sequence[torch.Tensor],
        launch: bool,
    ) -> list[Any]:
        """Run the backward. Returns the gradients that `needs` asks for.

        An empty tensor stands for a gradient of None: the operator returns a list of tensors.
        """
        trace = self._traces[
            (*sizes, lengths_of(state)) if launch else ("shapes", tuple([int(n) for n in sizes]))
        ]
        tensors = [None if one is None else one.of(saved) for one in trace.places.sources]
        plan = (self._planned if launch else self.bound)(trace.shapes, state)
        with process_state().gemms.apart():
            found = segments.backward(plan, grads, tensors, trace.of_segments, {}, state)
        known = {id(grad) for grad in grads}
        needed: list[Any] = []
        for grad, need in zip(found, self.needs, strict=False):
            if not need:
                continue
            if grad is None:
                device = next(grad.device for grad in grads if grad is not None)
                needed.append(torch.empty(0, device=device))
            else:
                needed.append(grad.clone() if id(grad) in known else grad)
                known.add(id(needed[-1]))
        return needed


def _joined_chain(count: int, parts: Sequence[PlacedPart], outputs: Sequence[int]) -> Chain:
    """The chain of the stages of all parts."""
    built = ChainBuilder(*[f"value {i}" for i in range(count)])
    values = [*range(count)]
    for facts, inputs, _ in parts:
        values += built.add_part(TEMPLATES[facts.kind], *[values[v] for v in inputs])
    chain = built.chain(*[values[v] for v in outputs])
    chain.layer = "in compiled code"
    return chain


def _needs_of_values(count: int, parts: Sequence[PlacedPart]) -> tuple[bool, ...]:
    """For each value that comes in, whether its gradient is wanted."""
    needs = [False] * count
    for facts, inputs, _ in parts:
        for v, need in zip(inputs, facts.needs, strict=False):
            if v < count:
                needs[v] = need
    return tuple(needs)


def lengths_of(state: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The row lengths of these states' memory, which depend on the lengths of amax histories."""
    return tuple([room.shape[1] for room in state])


def _by_stages(of_segments: Sequence[Trace]) -> list[bool]:
    """For each segment, whether its stages ran one by one."""
    return [trace.stages is not None for trace in of_segments]


def _readings(saved: Tensors, of_segments: Sequence[Trace]) -> list[Any]:
    """For each saved tensor, the views of it that the backward reads."""
    found: list[Any] = []
    for trace in of_segments:
        if trace.stages is None:
            assert trace.segment is not None
            found += trace.segment.readings()
        else:
            own = saved[len(found) : len(found) + trace.tensors]
            found += [() if x is None else (reading_of(x),) for x in own]
    return found
