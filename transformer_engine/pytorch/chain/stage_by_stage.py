"""Runs a chain stage by stage, forward and backward.

The backward of a collective starts as soon as the gradient that it sends exists. While it runs, the
gradients of the parameters of the next stage are computed, unless `backward_dw` does so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import ChainStep
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters, ResultRequest, Saved
from transformer_engine.pytorch.chain.weight_casts import cast_weights
from transformer_engine.pytorch.fp8.casts.operands import PendingCast
from transformer_engine.pytorch.kernels.dropout_add import dropout_add_forward
from transformer_engine.pytorch.parallel.collectives import lent, release, waited


def run_forward(plan: CallPlan, values: list[Any], start: int, stop: int) -> list[Saved]:
    """Run the steps from `start` to `stop - 1`, stage by stage and without autograd.

    `values` are those of the chain, parameters included. Results and new seeds are added to the
    list, and a value is removed after its last reader has run.

    Returns:
        What each step saved.
    """
    steps, plans = plan.chain.steps, plan.stage_plans
    record: list[Saved] = []
    for step in steps[start:stop]:
        if not step.stage.takes_strides:
            values[step.parameters] = contiguous_values(values[step.parameters])
    cast = cast_weights(plan, values, start, stop)
    for i in range(start, stop):
        step = steps[i]
        inputs = [values[v] for v in step.inputs]
        if not step.stage.takes_pending:
            inputs = [waited(x) for x in inputs]
        if not step.stage.takes_strides:
            inputs = contiguous_values(inputs)
        request = None
        if step.consumer >= 0 and isinstance(inputs[0], torch.Tensor):
            reader = _requesting(steps, step.consumer)
            request = steps[reader].stage.request(plans[reader], inputs[0])
        if step.stage.draws:
            step.draw_seed(plans[i], values, step.parameters.stop - 1, inputs[0].device)
        parameters = cast.pop(i, None) or values[step.parameters]
        results, saved = step.stage.forward(inputs, parameters, plans[i], request)
        del parameters
        for v in step.last_reads:
            values[v] = None
        inputs.clear()
        for v, result in zip(step.outputs, results, strict=True):
            values[v] = result.cast() if isinstance(result, PendingCast) else result
        del results, result  # frees the plain tensors that were cast
        record.append(saved)
    return record


def _requesting(steps: Sequence[ChainStep], consumer: int) -> int:
    """The step whose request counts: the consumer, or the one that it passes its input on to."""
    while steps[consumer].stage.passes_requests and steps[consumer].consumer >= 0:
        consumer = steps[consumer].consumer
    return consumer


class ParamGradTask:
    """Computes the gradients of a step's parameters, while a collective runs or in `backward_dw`.

    Args:
        plan: the plan of the call.
        grads: gradients of all values, which `finish` adds to.
        number: number of the step.
        carry: returned by `backward_data` of the step.
        saved: what the forward of the step saved.
        input_again: see `Saved`; it may be pending.
    """

    def __init__(
        self,
        plan: CallPlan,
        grads: list[Any],
        number: int,
        carry: Any,
        saved: Saved,
        input_again: Any,
    ) -> None:
        self.plan, self.grads, self.number = plan, grads, number
        self.carry, self.saved, self.input_again = carry, saved, input_again

    def finish(self) -> None:
        """Compute and store the gradients; or queue the task, if the stage delays them."""
        step = self.plan.chain.steps[self.number]
        if step.stage.delays(self.plan.stage_plans[self.number]):
            self.grads = []  # a waiting task must not hold the gradients of other values
            step.stage.delayed.append(self)
            return
        for v, grad in enumerate(self.gradients()):
            self.grads[step.parameters.start + v] = grad

    def gradients(self) -> Parameters:
        """Compute the gradients."""
        stage, plan = self.plan.chain.steps[self.number].stage, self.plan.stage_plans[self.number]
        saved = self.saved
        if self.input_again is None:
            return stage.backward_params(self.carry, saved, plan)
        saved = saved._replace(input_again=lent(self.input_again))
        grads = stage.backward_params(self.carry, saved, plan)
        release(self.input_again)
        return grads


def run_backward(
    plan: CallPlan,
    grads: list[Any],
    record: list[Saved],
    start: int,
    stop: int,
    regathered: Any = None,
) -> Any:
    """Run the backward of the steps from `start` to `stop - 1`, the last one first.

    The steps add their gradients to `grads`, those of all values, parameters included. `record`,
    what the steps saved, is emptied, which frees memory after each stage. `regathered` is the input
    of the first step, see `Stage.regather`; it may be pending.

    Returns:
        The task of the first step, if it is to run once the collective before it has started, or in
        `backward_dw`; else None.
    """
    steps, plans = plan.chain.steps, plan.stage_plans
    task: ParamGradTask | None = None
    result_request: ResultRequest | None = None
    for i in range(stop - 1, start - 1, -1):
        step, saved = steps[i], record.pop()
        output_grads = [grads[v] for v in step.outputs]
        for v in step.outputs:
            grads[v] = None
        if not step.stage.takes_pending:
            output_grads = [waited(grad) for grad in output_grads]
        if not step.stage.takes_strides:
            output_grads = contiguous_values(output_grads)
        if not (plan.differentiable[i] and any([grad is not None for grad in output_grads])):
            finish(task)
            task = None
            continue
        overlaps = step.producer >= 0 and steps[step.producer].stage.communicates
        if overlaps and record:
            regathered = steps[i - 1].stage.regather(record[-1], plans[i - 1])
        request = None
        if step.producer >= 0 and isinstance(output_grads[0], torch.Tensor):
            request = steps[step.producer].stage.grad_request(plans[step.producer], output_grads[0])
        if result_request is not None:
            saved = saved._replace(result_request=result_request)
        results, carry = step.stage.backward_data(output_grads, saved, plans[i], request)
        output_grads.clear()
        for v, result in zip(step.inputs, results, strict=True):
            grads[v] = add_grads(grads[v], result)
        del results, result
        if result_request is not None:
            assert task is not None
            task.input_again, carry = carry
        finish(task)
        result_request = step.stage.input_request(saved, plans[i])
        task = ParamGradTask(plan, grads, i, carry, saved, regathered if overlaps else None)
        del carry, saved
        waits = overlaps or result_request is not None or step.stage.delays(plans[i])
        if not waits:
            task.finish()
            task = None
    return task


def finish(task: ParamGradTask | None) -> None:
    """Finish a task, if there is one."""
    if task is not None:
        task.finish()


def contiguous_values(values: Sequence[Any]) -> list[Any]:
    """Values and parameters, copied where they are tensors of other strides."""
    return [
        x.contiguous() if isinstance(x, torch.Tensor) and not x.is_contiguous() else x
        for x in values
    ]


def add_grads(grad: Any, more: Any) -> Any:
    """The sum of two gradients of a value that several stages read; None is no gradient."""
    if isinstance(more, PendingCast):
        more = more.cast()
    if grad is None or more is None:
        return more if grad is None else grad
    grad, more = waited(grad), waited(more)
    if torch.compiler.is_compiling():
        return grad + more
    return dropout_add_forward(more.contiguous(), None, grad, None, 0.0)
