"""Chains in compiled code: one operator for the forward, one for the backward."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.chain import segments
from transformer_engine.pytorch.chain.chain import run_forward
from transformer_engine.pytorch.chain.gemm import counting_apart
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.segment import traced
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.quantizers import GemmQuantizers, Quantizer
from transformer_engine.pytorch.recompute.compiled_scales import refuse_in_backward, scales_of_call
from transformer_engine.pytorch.kernels.library import composite_op, library_op

Tensors = Sequence[torch.Tensor | None]


class NotOneOperator(Exception):
    """A call must be traced stage by stage."""


def _subclasses(cls: type) -> dict[str, Any]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


def _gemm_quantizers(description: Any, tensors: Any) -> GemmQuantizers:
    known = _subclasses(Quantizer)
    made = GemmQuantizers(*[known[d[0]].rebuilt(d, tensors) for d in description[:6]])
    made.fast_accumulation = description[6]
    return made


class _Entry:
    def __init__(self, chain: Any, dtype: Any, needs: Any, descriptions: Any, flush: Any, staged: Any) -> None:
        self.chain = copy.deepcopy(chain)
        for stage in self.chain.matmuls:
            stage.cached_weight, stage._cached_tensors = None, ()
        self.facts = (dtype, needs, descriptions)
        self.flush, self.staged = flush, staged
        self.needs = needs
        self._plan_of_calls: CallPlan | None = None
        self.traces: dict[Any, Any] = {}
        self.reads: tuple[bool, ...] = ()
        self.results: list[int] = []

    @property
    def plan(self) -> CallPlan:
        if self._plan_of_calls is None:
            ds = [d for each in self.facts[2] for d in each[:6]]
            count = sum(1 + d[2] for d in ds if d[0] == "DelayedQuantizer")
            state = [torch.empty(1, device="cpu") for _ in range(count)]
            plan = self._plan(state)
            plan.bind, plan.state = self._plan, state
            self._plan_of_calls = plan
        return self._plan_of_calls

    def _plan(self, state: Any) -> CallPlan:
        tensors = iter(state)
        dtype, needs, descriptions = self.facts
        quantizers = [_gemm_quantizers(d, tensors) for d in descriptions]
        return self.chain.prepare(CallPlan(dtype, needs, quantizers))

    def fake_forward(self, inputs: Any, state: Any) -> list[torch.Tensor]:
        chain = self.chain
        values = [*inputs, *chain.results]
        plan = self._plan(state)
        with counting_apart():
            trace, saved = traced(None, run_forward(plan, values, 0, len(chain.steps)))
        results = [values[v] for v in chain.outputs]
        fresh, places = placed(inputs, [*results, *saved])
        self._note(inputs, results, places)
        self.traces["fake", self.sizes(inputs)] = (places[len(results):], (trace,))
        return fresh

    def _note(self, inputs: Any, results: Any, places: Any) -> None:
        self.results = places[: len(results)]
        read = {-1 - p for p in places[len(results):] if p is not None and p < 0}
        self.reads = tuple(i in read for i in range(len(inputs)))

    def sizes(self, inputs: Any) -> tuple[int, ...]:
        return tuple([s for x in inputs[: self.chain.inputs] for s in x.shape])

    def forward(self, inputs: Any, state: Any) -> list[torch.Tensor]:
        if self.flush:
            process_state().flush()
        if state and any(self.needs):
            refuse_in_backward()
        results, saved, traces = segments.forward(self.plan, tuple(inputs), state)
        sizes = self.sizes(inputs)
        known = self.traces.get(sizes)
        if known is None:
            fresh, places = placed(inputs, [*results, *saved])
            self._note(inputs, results, places)
            picks = {}
            for i, p in enumerate(places):
                if p is not None and p >= 0:
                    picks.setdefault(p, i)
            known = self.traces[sizes] = (places[len(results):], traces, [*picks.values()])
            return fresh
        both = [*results, *saved]
        return [both[i] for i in known[2]]

    def backward(self, sizes: Any, grads: Any, saved: Any, state: Any, fake: bool) -> list[Any]:
        key = ("fake", tuple(sizes)) if fake else tuple(sizes)
        known = self.traces[key]
        count = len(self.reads)
        tensors = [
            None if p is None else saved[p + count - len(self.fresh_results())] if p >= 0 else saved[-1 - p] for p in known[0]
        ]
        plan = self._plan(state) if fake else self.plan
        with counting_apart():
            found = segments.backward(plan, grads, tensors, known[1], {}, state)
        needed = [g for g, need in zip(found, self.needs, strict=False) if need]
        return [torch.empty(0, device=x.device) if (x := g) is None else g for g in needed]

    def flushed(self, state: Any) -> Any:
        """The state where stages are traced one by one: scales are copies, made after updates."""
        if not (self.flush and state):
            return state
        scales, first = [], 0
        for descriptions in self.facts[2]:
            for i, d in enumerate(descriptions[:6]):
                if d[0] == "DelayedQuantizer":
                    scales += [first] if i < 2 else []
                    first += 1 + d[2]
        copies = scales_of_call([state[i] for i in scales], True, any(self.needs), 1)
        state = [*state]
        for at, i in enumerate(scales):
            state[i] = copies[0, 4 * at : 4 * at + 1]
        return state

    def fresh_results(self) -> list[int]:
        return [p for p in self.results if p >= 0]


def placed(inputs: Any, tensors: Any) -> tuple[list[torch.Tensor], list[int | None]]:
    """The tensors that are no inputs, once each; for each tensor its number, `-1 - input`, None."""
    fresh: list[torch.Tensor] = []
    places: list[int | None] = []
    known: dict[int, tuple[int, Any]] = {}
    for i, x in enumerate(inputs):
        if x is not None:
            known.setdefault(x.untyped_storage()._cdata, (-1 - i, x))
    for t in tensors:
        if t is None:
            places.append(None)
            continue
        cdata = t.untyped_storage()._cdata
        if cdata not in known:
            known[cdata] = (len(fresh), t)
            fresh.append(t)
        place, whole = known[cdata]
        if (whole.shape, whole.stride(), whole.dtype) != (t.shape, t.stride(), t.dtype):
            raise NotOneOperator(f"{tuple(t.shape)} in {tuple(whole.shape)}")
        places.append(place)
    return fresh, places


_ENTRIES: dict[str, _Entry] = {}


def operator_key(chain: Any, kind: str, dtype: Any, needs: Any, descriptions: Any, flush: Any, staged: Any) -> str:
    text = repr((kind, dtype, needs, descriptions, flush, staged))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    if key not in _ENTRIES:
        _ENTRIES[key] = _Entry(chain, dtype, needs, descriptions, flush, staged)
    return key


@library_op()
def chain_forward(
    key: str, inputs: list[torch.Tensor | None], state: list[torch.Tensor], *, launch: bool = True
) -> list[torch.Tensor]:
    entry = _ENTRIES[key]
    return entry.forward(inputs, state) if launch else entry.fake_forward(inputs, state)


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
    return _ENTRIES[key].backward(sizes, grads, saved, state, not launch)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: str, state: Any, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        entry = _ENTRIES[key]
        made = torch.ops.te.chain_forward(key, inputs, state)
        results = entry.results
        count = len(entry.fresh_results())
        ctx.call = key, state, entry.sizes(inputs)
        reads = [x if read else None for x, read in zip(inputs, entry.reads, strict=True)]
        ctx.save_for_backward(*reads, *made[count:])
        found = [made[p] if p >= 0 else inputs[-1 - p] for p in results]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        key, state, sizes = ctx.call
        contiguous = [g if g is None or g.is_contiguous() else g.contiguous() for g in grads]
        found = iter(torch.ops.te.chain_backward(key, sizes, contiguous, [*ctx.saved_tensors], state))
        needs = _ENTRIES[key].needs
        return (None, None, *[next(found) if need else None for need in needs])


@composite_op("chain(str key, Tensor?[] inputs, Tensor[] state) -> Tensor[]")
def chain_operator(key: str, inputs: Any, state: Any) -> list[torch.Tensor]:
    entry = _ENTRIES[key]
    if entry.staged or any(isinstance(n, torch.SymInt) for n in entry.sizes(inputs)):
        if not entry.staged:
            state = entry.flushed(state)
        found = call_chain(entry._plan(state), None, *inputs)
        return [*found] if isinstance(found, tuple) else [found]
    if any(entry.needs):
        return list(_Node.apply(key, state, *inputs))
    made = torch.ops.te.chain_forward(key, inputs, state)
    return [made[p] if p >= 0 else inputs[-1 - p] for p in entry.results]
