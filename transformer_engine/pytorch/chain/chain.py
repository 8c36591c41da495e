"""The chain runs a list of stages forward and backward: the one autograd function of modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import bare_apply, transforms_active
from transformer_engine.pytorch.chain.gemm import count_group
from transformer_engine.pytorch.chain.replay import Replay
from transformer_engine.pytorch.chain.stages.base import Parameters, Run, Saved, Stage
from transformer_engine.pytorch.chain.stages.matmul import Matmul
from transformer_engine.pytorch.chain.stages.norm import Norm
from transformer_engine.pytorch.chain.tape import Memory
from transformer_engine.pytorch.export.onnx import exporting
from transformer_engine.pytorch.fp8.autocast import autocast_stack
from transformer_engine.pytorch.fp8.operands import Uncast

_MOST_REPLAYS = 32  # shapes of one run; other shapes run by stages


class Chain:
    """A fixed list of stages. Calls are `chain(x, parameters, run)`.

    `parameters` lists those of all stages in order. The result is `y`, or `(y, tap)` where the
    first stage is a Norm with a tap.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        slot = 1  # needs[0] is the input's
        for stage in self.stages:
            stage.slot = slot
            slot += stage.parameter_count
        first = self.stages[0]
        self.has_tap = isinstance(first, Norm) and first.tap is not None
        self.taps_output = isinstance(first, Norm) and first.tap == "output"
        self.gemm_names = self._gemm_names()

    @property
    def matmuls(self) -> list[Matmul]:
        """Its stages with GEMMs."""
        return [stage for stage in self.stages if isinstance(stage, Matmul)]

    def _gemm_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.matmuls)

    def rename(self, layer: str) -> None:
        """Let every stage follow the name of the module."""
        for stage in self.stages:
            stage.rename(layer)
        self.gemm_names = self._gemm_names()

    def plan(self, run: Run) -> Run:
        """Let every stage decide what it can for all calls of a run."""
        run.chain = self
        run.compiling = torch.compiler.is_compiling()
        run.exporting = exporting()
        run.recording = run.recording and not run.exporting
        run.plans = plans = [stage.prepare(run) for stage in self.stages]
        if not run.compiling and all(
            stage.replayable(plan) for stage, plan in zip(self.stages, plans, strict=True)
        ):
            run.replays = {}
        run.caching = [one for one in zip(self.stages, plans, strict=True) if one[0].caches(one[1])]
        return run

    def __call__(self, x: torch.Tensor, parameters: Parameters, run: Run) -> Any:
        """Run forward, recorded by autograd where a gradient is wanted."""
        if run.recording:
            if run.compiling or transforms_active():
                result = _ChainFunction.apply(run, x, *parameters)
                for stage, _ in run.caching:
                    stage.detach_cache()
                if run.columns is not None:
                    run.columns.note_amaxes(result[0] if self.has_tap else result)
                return result
            return _bare_apply(run, x, *parameters)
        replayed = self.replayed((x, *parameters), run)
        if replayed is not None:
            replay, memory = replayed
            return replay.result(memory)
        if run.exporting:
            return self.exported(x, parameters, run)
        return self.forward_by_stages(x, parameters, run)[0]

    def replayed(
        self, inputs: tuple[torch.Tensor | None, ...], run: Run
    ) -> tuple[Replay, Memory] | None:
        """Run forward by one call of `_C`, of the input and all parameters; None: cannot be."""
        replays = run.replays
        if replays is None:
            return None
        shape = inputs[0].shape  # type: ignore[union-attr]
        replay = replays.get(shape)
        given = _unpacked(inputs, run.kept) if run.kept else inputs
        if run.caching:
            cached = _cached(run.caching)
            if cached is None:
                return None
            given += cached
        if replay is None:
            if shape in replays or len(replays) >= _MOST_REPLAYS:
                return None
            replay = replays[shape] = Replay.of(run, given, inputs[1:])
            if replay is None:
                return None
        memory = replay.run(given)
        if memory is None:
            return None
        count_group(replay.gemms)
        return replay, memory

    def forward_by_stages(
        self, x: torch.Tensor, parameters: Parameters, run: Run
    ) -> tuple[Any, list[Saved]]:
        """The result, and what each stage saved."""
        value: Any = x
        record: list[Saved] = []
        tap = None
        stages = self.stages
        plans = run.plans
        for i, stage in enumerate(stages):
            wants = None
            if i + 1 < len(stages) and isinstance(value, torch.Tensor):
                wants = stages[i + 1].demand(plans[i + 1], value)
            own = parameters[stage.slot - 1 : stage.slot - 1 + stage.parameter_count]
            value, saved = stage.forward(value, own, plans[i], wants)
            if isinstance(value, Uncast):
                value = value.cast()
            tap = saved.tap if i == 0 else tap
            record.append(saved)
        return ((value, tap) if self.has_tap else value), record

    def exported(self, x: torch.Tensor, parameters: Parameters, run: Run) -> Any:
        """The result as a graph of ONNX operators, see export.py."""
        value, tap = x, x
        for i, stage in enumerate(self.stages):
            own = parameters[stage.slot - 1 : stage.slot - 1 + stage.parameter_count]
            value = stage.exported(value, own, run.plans[i])
            if i == 0 and self.taps_output:
                tap = value.to(run.dtype)
        value = value.to(run.dtype)
        return (value, tap) if self.has_tap else value

    def backward_by_stages(
        self,
        grad: torch.Tensor | None,
        record: list[Saved],
        run: Run,
    ) -> list[torch.Tensor | None]:
        """Gradients of the input and of every parameter; the first record has the tap's."""
        grads: list[torch.Tensor | None] = [None] * len(run.needs)
        value: Any = grad
        for i in range(len(self.stages) - 1, -1, -1):
            stage, saved = self.stages[i], record[i]
            if value is None and saved.tap is None:
                continue
            wants = None
            if i > 0 and isinstance(value, torch.Tensor):
                wants = self.stages[i - 1].grad_demand(run.plans[i - 1], value)
            # Without a value there is the gradient of a Norm's tap.
            value, carry = stage.backward_data(value, saved, run.plans[i], wants)
            if isinstance(value, Uncast):
                value = value.cast()
            own = stage.backward_params(carry, saved, run.plans[i])
            for k, parameter_grad in enumerate(own):
                if run.needs[stage.slot + k]:
                    grads[stage.slot + k] = parameter_grad
        if run.needs[0]:
            grads[0] = value
        return grads


def _unpacked(
    inputs: tuple[torch.Tensor | None, ...], kept: tuple[int, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Weights kept in FP8 as what they consist of, behind everything else."""
    weights: list[Any] = [inputs[i] for i in kept]
    others = [None if i in kept else t for i, t in enumerate(inputs)]
    return (*others, *(t for w in weights for t in w.parts))


def _cached(stages: Sequence[tuple[Stage, Any]]) -> tuple[torch.Tensor | None, ...] | None:
    """What stages have kept for these plans; None where one has yet to make it."""
    tensors: tuple[torch.Tensor | None, ...] = ()
    for stage, plan in stages:
        cached = stage.cached(plan)
        if cached is None:
            return None
        tensors += cached
    return tensors


Facts = Sequence[tuple[int, Any]]  # of stages: how many tensors are whose, and what else each keeps
Forward = tuple[Any, Sequence[torch.Tensor | None], Replay | None, Facts]


def run_forward(run: Run, inputs: tuple[torch.Tensor | None, ...]) -> Forward:
    """Run the forward of a run's chain on its input and parameters, for a backward.

    Returns:
        What the chain returns; the tensors that its backward reads; the replay by which it ran,
        None by stages; the facts of the stages.
    """
    chain = run.chain
    replayed = chain.replayed(inputs, run)
    run.replayed = replayed is not None
    if replayed is not None:
        replay, memory = replayed
        return replay.result(memory), replay.kept(memory), replay, ()
    result, record = chain.forward_by_stages(inputs[0], inputs[1:], run)
    tensors = [tensor for saved in record for tensor in saved.tensors]
    return result, tensors, None, [(len(saved.tensors), saved.facts) for saved in record]


def run_backward(
    run: Run,
    replay: Replay | None,
    facts: Facts,
    tensors: Sequence[torch.Tensor | None],
    grad: torch.Tensor | None,
    tap_grad: torch.Tensor | None,
) -> Sequence[torch.Tensor | None]:
    """Gradients of the input and of every parameter.

    Args:
        run: of the forward.
        replay: see `run_forward`.
        facts: see `run_forward`.
        tensors: see `run_forward`.
        grad: of the result, contiguous.
        tap_grad: of the tap, contiguous.
    """
    if replay is not None:
        return replay.backward(run, (grad, tap_grad), tensors)
    start, record = 0, []
    for count, fact in facts:
        record.append(Saved(tuple(tensors[start : start + count]), fact, tap_grad))
        start += count
        tap_grad = None  # the first stage's alone
    grads: list[torch.Tensor | None] = run.chain.backward_by_stages(grad, record, run)
    return grads


class _ChainFunction(torch.autograd.Function):
    """Forward and backward of a chain. The tensors that stages save go through autograd."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Any) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        result, tensors, ctx.replay, ctx.facts = run_forward(run, inputs)
        ctx.save_for_backward(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, tap_grad: torch.Tensor | None = None) -> Any:
        if grad is not None and not grad.is_contiguous():
            grad = grad.contiguous()
        if tap_grad is not None and not tap_grad.is_contiguous():
            tap_grad = tap_grad.contiguous()
        run = ctx.run
        grads = run_backward(run, ctx.replay, ctx.facts, ctx.saved_tensors, grad, tap_grad)
        if run.ends_backward:
            autocast_stack().end_backward()
        return (None, *grads)


_bare_apply = bare_apply(_ChainFunction)
