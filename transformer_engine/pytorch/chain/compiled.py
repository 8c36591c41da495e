"""Chains in compiled code: one operator for a forward, one for its backward, recorded as in eager.

Dynamo sees `te::chain`. AOTAutograd looks inside and finds the autograd function below, which calls
`te::chain_forward` and `te::chain_backward`; they run what eager calls run (`segments`). A key says
which chain that is and in which facts its calls agree. It is made of their description, so that
layers that are alike share one graph, and a graph that a cache on disk keeps means the same in
another process. All tensors of the module come in with each call: quantizers of such a plan read
stand-ins in place of scaling state, which `bind` replaces where stages run one by one.

Calls are traced stage by stage where sizes are symbols, where the input is so large that the GPU is
what takes time (parts give memory back earlier), and in checkpoints, whose policies name operators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import compiling, constant_in_graphs, memory_of
from transformer_engine.pytorch.chain import segments
from transformer_engine.pytorch.chain.chain import TEMPLATES
from transformer_engine.pytorch.chain.gemm import CountingApart
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.segment import traced
from transformer_engine.pytorch.chain.stage_by_stage import run_forward
from transformer_engine.pytorch.fp8.compiled_scales import refuse_in_backward
from transformer_engine.pytorch.fp8.described import described_gemm
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.recipe_quantizers import columns_in_memory
from transformer_engine.pytorch.kernels.library import composite_op, library_op

Tensors = Sequence[torch.Tensor | None]


class Facts(NamedTuple):
    """What is equal for all calls of an operator.

    Attributes:
        kind: `Chain.kind`.
        dtype: of activations.
        needs: see `CallPlan`.
        gemms: descriptions of the quantizers of each GEMM.
        flush: first run the updates of scales that compiled code has deferred.
        recomputed: a checkpoint in the graph may recompute the call.
    """

    kind: str
    dtype: torch.dtype
    needs: tuple[bool, ...]
    gemms: tuple[Any, ...]
    flush: bool
    recomputed: bool


class _Trace(NamedTuple):
    """How forwards with certain sizes ran, as their backward must know.

    Attributes:
        sources: where the backward operator finds what was saved among the tensors that it gets;
            None for None.
        of_segments: returned by `segments.forward`.
        by_stages: of each segment, whether its stages ran one by one.
        picks: the results and saved tensors that the operator returns, by number.
    """

    sources: Sequence[int | None]
    of_segments: Sequence[Any]
    by_stages: Sequence[bool]
    picks: Sequence[int]


class ChainOperator:
    """The operator with a certain key.

    Attributes:
        facts: of its calls.
        chain: the template of that kind, which belongs to no module.
        results: places of what the chain returns, see `_places`.
        reads: for each input and each tensor that a call makes, whether backward reads it.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.chain = TEMPLATES[facts.kind]
        self._recorded = any(facts.needs)
        self.results: Sequence[Any] = ()
        self.reads: Sequence[bool] = ()
        self._plans: dict[int, CallPlan] = {}  # by lengths of histories
        self._traces: dict[Any, _Trace] = {}

    def bound(
        self,
        state: Sequence[torch.Tensor],
        staged: bool = False,
        cse_barrier: torch.Tensor | None = None,
    ) -> CallPlan:
        """A plan of calls with this scaling state.

        Args:
            state: the memory of scaling state, forward and backward; empty without any.
            staged: the call is traced stage by stage, and casts with copies of the scales.
            cse_barrier: see `CallPlan`.
        """
        facts, columns = self.facts, None
        of_gemms: list[Any] = [None] * len(facts.gemms)
        if state:
            how = (any(facts.needs), facts.flush, facts.recomputed if staged else None)
            columns, of_gemms = columns_in_memory(state, len(of_gemms), *how)
        gemms = [described_gemm(*one) for one in zip(facts.gemms, of_gemms, strict=True)]
        plan = CallPlan(facts.dtype, facts.needs, gemms)
        plan.columns, plan.cse_barrier = columns, cse_barrier
        return self.chain.prepare(plan)

    def run_staged(self, inputs: Tensors, state: Sequence[torch.Tensor]) -> Any:
        """A call that is traced stage by stage.

        The partitioner of AOTAutograd merges equal casts of two checkpoints. Then it would have to
        save one result of the merged cast and recompute another, which torch 2.15 cannot. It does
        not merge uninitialised tensors, so casts with different `cse_barrier`s stay separate.
        """
        first = inputs[0]
        assert first is not None
        barrier = None
        if self.facts.recomputed:
            barrier = torch.empty(0, dtype=torch.int32, device=first.device)
        return call_chain(self.bound(state, staged=True, cse_barrier=barrier), None, *inputs)

    def _planned(self, state: Sequence[torch.Tensor]) -> CallPlan:
        """The plan of recorded calls. The first call makes it; it is not traced."""
        length = _length(state)
        plan = self._plans.get(length)
        if plan is None:
            stand_ins = [torch.empty(room.shape, device="cpu") for room in state]
            plan = self._plans[length] = self.bound(stand_ins)
            plan.state, plan.bind = stand_ins, self.bound
        return plan

    def sizes(self, inputs: Tensors) -> tuple[int, ...]:
        """The sizes of all values that come in."""
        return tuple([n for x in inputs[: self.chain.inputs] for n in x.shape])  # type: ignore[union-attr]

    def staged(self, inputs: Tensors) -> bool:
        """Whether a call is traced stage by stage."""
        first = inputs[0]
        assert first is not None
        if self.facts.recomputed or any(isinstance(n, torch.SymInt) for n in self.sizes(inputs)):
            return True
        return not (segments.is_host_bound(first) and first.numel())

    def forward(self, inputs: Tensors, state: Sequence[torch.Tensor]) -> list[Any]:
        """Run a forward; the new tensors among its results and what backward reads."""
        if self.facts.flush:
            process_state().flush()
        if state and self._recorded:
            refuse_in_backward()
        plan, sizes = self._planned(state), (*self.sizes(inputs), _length(state))
        trace = self._traces.get(sizes)
        with CountingApart():
            results, saved, of_segments = segments.forward(plan, tuple(inputs), state)
            if trace is not None and trace.by_stages != _by_stages(of_segments):
                # recorded before, but these addresses or strides do not suit the recording
                copies = tuple([None if x is None else x.clone() for x in inputs])
                results, saved, of_segments = segments.forward(plan, copies, state)
        made = [*results, *saved]
        if trace is None:
            trace = self._traces[sizes] = self._trace_of(inputs, made, of_segments)
        return [made[i] for i in trace.picks]

    def shapes_of_forward(self, inputs: Tensors, state: Sequence[torch.Tensor]) -> list[Any]:
        """`forward` of fake tensors."""
        chain = self.chain
        values = [*inputs, *chain.results]
        with CountingApart():
            of_all, saved = traced(
                None, run_forward(self.bound(state), values, 0, len(chain.steps))
            )
        made = [*[values[v] for v in chain.outputs], *saved]
        trace = self._trace_of(inputs, made, (of_all,))
        # A size that was a symbol, and is a number by now, has no hash.
        self._traces["shapes", tuple([int(n) for n in self.sizes(inputs)])] = trace
        return [made[i] for i in trace.picks]

    def _trace_of(self, inputs: Tensors, made: Tensors, of_segments: Sequence[Any]) -> _Trace:
        """The trace of a call. Also sets `results` and `reads`, which are equal for all sizes."""
        places = _places(inputs, made)
        results = len(self.chain.outputs)
        self.results = places[:results]
        firsts = {place: i for i, place in reversed([*enumerate(places)])}
        picks = [firsts[i] for i in sorted(p for p in firsts if p is not None and p >= 0)]
        sources = [
            None if place is None else -1 - place if place < 0 else len(inputs) + place
            for place in places[results:]
        ]
        self.reads = [i in sources for i in range(len(inputs) + len(picks))]
        return _Trace(sources, of_segments, _by_stages(of_segments), picks)

    def backward(
        self,
        sizes: Sequence[int],
        grads: Tensors,
        saved: Tensors,
        state: Sequence[torch.Tensor],
        launch: bool,
    ) -> list[Any]:
        """The gradients that `needs` asks for. An empty tensor stands for a gradient of None."""
        trace = self._traces[
            (*sizes, _length(state)) if launch else ("shapes", tuple([int(n) for n in sizes]))
        ]
        tensors = [None if i is None else saved[i] for i in trace.sources]
        plan = self._planned(state) if launch else self.bound(state)
        with CountingApart():
            found = segments.backward(plan, grads, tensors, trace.of_segments, {}, state)
        known = {id(grad) for grad in grads}
        needed: list[Any] = []
        for grad, need in zip(found, self.facts.needs, strict=False):
            if not need:
                continue
            if grad is None:
                device = next(grad.device for grad in grads if grad is not None)
                needed.append(torch.empty(0, device=device))
            else:
                needed.append(grad.clone() if id(grad) in known else grad)
                known.add(id(needed[-1]))
        return needed


def _length(state: Sequence[torch.Tensor]) -> int:
    """The length of the amax histories in this state."""
    return state[0].shape[1] if state else 0


def _by_stages(of_segments: Sequence[Any]) -> list[bool]:
    """Of each segment, whether its stages ran one by one."""
    return [trace.stages is not None for trace in of_segments]


def _places(inputs: Tensors, made: Tensors) -> list[int | None]:
    """Where each tensor is: `-1 - i` for input i, n for the n-th new tensor, None for None."""
    known: dict[int, tuple[int, torch.Tensor]] = {}
    for i, x in enumerate(inputs):
        if x is not None:
            known.setdefault(memory_of(x), (-1 - i, x))
    fresh, places = 0, list[int | None]()
    for t in made:
        if t is None:
            places.append(None)
            continue
        memory = memory_of(t)
        if memory not in known:
            known[memory] = (fresh, t)
            fresh += 1
        place, whole = known[memory]
        assert t.shape == whole.shape and t.stride() == whole.stride(), "parts of one tensor"
        places.append(place)
    return places


# By key. A key is a hash of the facts, so an operator is never replaced.
_OPERATORS: dict[str, ChainOperator] = {}


@constant_in_graphs
def operator_key(*facts: Any) -> str:
    """The key of calls with these `Facts`. Dynamo calls this and takes the result as a constant."""
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    if key not in _OPERATORS:
        _OPERATORS[key] = ChainOperator(Facts(*facts))
    return key


@library_op()
def chain_forward(
    key: str,
    inputs: list[torch.Tensor | None],
    state: list[torch.Tensor],
    *,
    launch: bool = True,
) -> list[torch.Tensor]:
    """The forward of a chain; amaxes in `state` are raised (docs/adr/0003).

    Args:
        key: of the operator.
        inputs: the values that come in, and the parameters.
        state: the memory of scaling state, forward and backward.
        launch: False gives the shapes alone.

    Returns:
        Results and saved tensors. None of them is an input, and no two share memory.
    """
    operator = _OPERATORS[key]
    if launch:
        return operator.forward(inputs, state)
    with compiling():
        return operator.shapes_of_forward(inputs, state)


@library_op()
def chain_backward(
    key: str,
    sizes: list[int],
    grads: list[torch.Tensor | None],
    saved: list[torch.Tensor | None],
    state: list[torch.Tensor],
    *,
    launch: bool = True,
) -> list[torch.Tensor]:
    """The backward of a chain; amaxes in `state` are raised.

    Args:
        key: of the forward.
        sizes: of all values that came in.
        grads: of the results, contiguous.
        saved: the inputs, and what the forward made; None for those that it does not read.
        state: of the forward.
        launch: False gives the shapes alone.

    Returns:
        Gradients, see `ChainOperator.backward`.
    """
    with nullcontext() if launch else compiling():
        return _OPERATORS[key].backward(sizes, grads, saved, state, launch)


class _CompiledNode(torch.autograd.Function):
    """The two operators as one node of the graph that AOTAutograd traces."""

    @staticmethod
    def forward(ctx: Any, key: str, state: Sequence[torch.Tensor], *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        operator = _OPERATORS[key]
        made = torch.ops.te.chain_forward(key, inputs, state)
        ctx.call = key, state, operator.sizes(inputs)
        known = zip((*inputs, *made), operator.reads, strict=True)
        ctx.save_for_backward(*[x if read else None for x, read in known])
        return tuple(_results(operator, inputs, made))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        key, state, sizes = ctx.call
        contiguous = [None if g is None else g.contiguous() for g in grads]
        saved = [*ctx.saved_tensors]
        found = iter(torch.ops.te.chain_backward(key, sizes, contiguous, saved, state))
        needs = _OPERATORS[key].facts.needs
        made = [next(found) if need else None for need in needs]
        return (None, None, *[g if g is None or g.shape != (0,) else None for g in made])


def _results(operator: ChainOperator, inputs: Tensors, made: Sequence[Any]) -> list[Any]:
    return [made[p] if p >= 0 else inputs[-1 - p] for p in operator.results]


@composite_op("chain(str key, Tensor?[] inputs, Tensor[] state) -> Tensor[]")
def chain(key: str, inputs: list[Any], state: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a chain returns, as compiled code calls it; see the top of this file."""
    operator = _OPERATORS[key]
    if operator.staged(inputs):
        with nullcontext() if type(inputs[0]) is torch.Tensor else compiling():
            made = operator.run_staged(inputs, state)
        return [*made] if isinstance(made, tuple) else [made]
    if any(operator.facts.needs):
        return [*_CompiledNode.apply(key, state, *inputs)]
    return _results(operator, inputs, torch.ops.te.chain_forward(key, inputs, state))
