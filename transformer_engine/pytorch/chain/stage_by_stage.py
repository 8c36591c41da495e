"""Runs of a chain stage by stage, forward and backward.

Where ranks run a stage together, the backward starts it as soon as its gradients are there, and
computes the parameters' gradients of the stage behind it meanwhile. A stage may delay its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import ChainStep
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stages.base import Parameters, Saved
from transformer_engine.pytorch.fp8.operands import PendingCast
from transformer_engine.pytorch.kernels.dropout_add import dropout_add_forward
from transformer_engine.pytorch.parallel.collectives import waited


def run_forward(plan: CallPlan, values: list[Any], start: int, stop: int) -> list[Saved]:
    """Run some steps of a plan's chain, stage by stage, without autograd.

    Args:
        plan: of the call.
        values: of the chain, parameters included. What steps make is put there, seeds are drawn
            and put there, and values that are read no more are removed.
        start: the first step.
        stop: the one behind the last.
    """
    steps, plans = plan.chain.steps, plan.stage_plans
    record: list[Saved] = []
    for i in range(start, stop):
        step = steps[i]
        inputs = [values[v] for v in step.inputs]
        if not step.stage.takes_pending:
            inputs = [waited(x) for x in inputs]
        if not step.stage.takes_strides:
            inputs = _contiguous(inputs)
        request = None
        if step.consumer >= 0 and isinstance(inputs[0], torch.Tensor):
            reader = _requesting(steps, step.consumer)
            request = steps[reader].stage.request(plans[reader], inputs[0])
        if step.stage.draws:
            step.draw_seed(plans[i], values, step.parameters.stop - 1, inputs[0].device)
        results, saved = step.stage.forward(inputs, values[step.parameters], plans[i], request)
        for v in step.last_reads:
            values[v] = None
        inputs.clear()
        for v, result in zip(step.outputs, results, strict=True):
            values[v] = result.cast() if isinstance(result, PendingCast) else result
        del results, result  # the plain values of what was cast
        record.append(saved)
    return record


def _requesting(steps: Sequence[ChainStep], consumer: int) -> int:
    """The step that requests operands of what a consumer reads."""
    while steps[consumer].stage.passes_requests and steps[consumer].consumer >= 0:
        consumer = steps[consumer].consumer
    return consumer


class Unfinished:
    """The parameters' gradients of a step, which are computed while a collective runs, or later.

    Args:
        plan: of the call.
        grads: of all values, where they go.
        number: of the step.
        carry: of its `backward_data`.
        saved: of its forward.
        restored: its input, see `Stage.restore`; it may be pending.
    """

    def __init__(
        self, plan: CallPlan, grads: list[Any], number: int, carry: Any, saved: Saved, restored: Any
    ) -> None:
        self.plan, self.grads, self.number = plan, grads, number
        self.carry, self.saved, self.restored = carry, saved, restored

    def finish(self) -> None:
        """Compute them, unless the stage delays that."""
        step = self.plan.chain.steps[self.number]
        if step.stage.delays(self.plan.stage_plans[self.number]):
            self.grads = []  # the others are not kept for it
            step.stage.delayed.append(self)
            return
        for v, grad in enumerate(self.gradients()):
            self.grads[step.parameters.start + v] = grad

    def gradients(self) -> Parameters:
        """Compute them now."""
        stage, plan = self.plan.chain.steps[self.number].stage, self.plan.stage_plans[self.number]
        saved = self.saved
        if self.restored is not None:
            saved = saved._replace(restored=waited(self.restored))
        return stage.backward_params(self.carry, saved, plan)


def run_backward(
    plan: CallPlan,
    grads: list[Any],
    record: list[Saved],
    start: int,
    stop: int,
    restored: Any = None,
) -> Any:
    """Run the backward of some steps, the last one first, stage by stage.

    Args:
        plan: of the forward.
        grads: of all values, parameters included. Those of what the steps read are put there or
            added to what is there.
        record: what the steps saved. It is emptied, so that memory is free as soon as its stage is
            done.
        start: the first step.
        stop: the one behind the last.
        restored: the input of the first step, see `Stage.restore`.

    Returns:
        What is left to do for the first step: once the collective before it has started, or later.
    """
    steps, plans = plan.chain.steps, plan.stage_plans
    waiting: Unfinished | None = None
    for i in range(stop - 1, start - 1, -1):
        step, saved = steps[i], record.pop()
        mine = [grads[v] for v in step.outputs]
        for v in step.outputs:
            grads[v] = None
        if not step.stage.takes_pending:
            mine = [waited(grad) for grad in mine]
        if not step.stage.takes_strides:
            mine = _contiguous(mine)
        if not (plan.differentiable[i] and any([grad is not None for grad in mine])):
            finish(waiting)
            waiting = None
            continue
        overlaps = step.producer >= 0 and steps[step.producer].stage.communicates
        if overlaps and record:
            restored = steps[i - 1].stage.restore(record[-1], plans[i - 1])
        request = None
        if step.producer >= 0 and isinstance(mine[0], torch.Tensor):
            request = steps[step.producer].stage.grad_request(plans[step.producer], mine[0])
        results, carry = step.stage.backward_data(mine, saved, plans[i], request)
        mine.clear()
        for v, result in zip(step.inputs, results, strict=True):
            grads[v] = add_grads(grads[v], result)
        del results, result
        finish(waiting)
        waiting = Unfinished(plan, grads, i, carry, saved, restored if overlaps else None)
        del carry, saved
        if not (overlaps or step.stage.delays(plans[i])):
            waiting.finish()
            waiting = None
    return waiting


def finish(waiting: Unfinished | None) -> None:
    """Do what is left to do."""
    if waiting is not None:
        waiting.finish()


def _contiguous(values: list[Any]) -> list[Any]:
    return [
        x.contiguous() if isinstance(x, torch.Tensor) and not x.is_contiguous() else x
        for x in values
    ]


def add_grads(grad: Any, more: Any) -> Any:
    """The gradient of a value that several stages read."""
    if isinstance(more, PendingCast):
        more = more.cast()
    if grad is None or more is None:
        return more if grad is None else grad
    grad, more = waited(grad), waited(more)
    if torch.compiler.is_compiling():
        return grad + more
    return dropout_add_forward(more.contiguous(), None, grad, None, 0.0)
