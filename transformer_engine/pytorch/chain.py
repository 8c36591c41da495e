"""The chain runs a list of stages forward and backward: the one autograd function of modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.autocast import autocast_stack
from transformer_engine.pytorch.stages.base import Parameters, Run, Saved, Stage, Uncast
from transformer_engine.pytorch.stages.matmul import Matmul
from transformer_engine.pytorch.stages.norm import Norm


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
        self.gemm_names = self._gemm_names()

    def _gemm_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages if isinstance(stage, Matmul))

    def rename(self, layer: str) -> None:
        """Let every stage follow the name of the module."""
        for stage in self.stages:
            stage.rename(layer)
        self.gemm_names = self._gemm_names()

    def plan(self, run: Run) -> Sequence[Any]:
        """Let every stage decide what it can for all calls of a run."""
        run.plans = [stage.prepare(run) for stage in self.stages]
        return run.plans

    def __call__(self, x: torch.Tensor, parameters: Parameters, run: Run) -> Any:
        """Run forward, recorded by autograd where a gradient is wanted."""
        if run.recording:
            return _apply(self, run, x, *parameters)
        return self.forward(x, parameters, run)[0]

    def forward(self, x: torch.Tensor, parameters: Parameters, run: Run) -> tuple[Any, list[Saved]]:
        """The result, and what each stage saved."""
        value: Any = x
        record: list[Saved] = []
        tap = None
        stages = self.stages
        plans = run.plans or self.plan(run)
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

    def backward(
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


class _ChainFunction(torch.autograd.Function):
    """Forward and backward of a chain. The tensors that stages save go through autograd."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, run: Run, x: torch.Tensor, *parameters: Any) -> Any:
        result, record = chain.forward(x, parameters, run)
        ctx.save_for_backward(*(tensor for saved in record for tensor in saved.tensors))
        ctx.chain = chain
        ctx.run = run
        ctx.facts = [(len(saved.tensors), saved.facts) for saved in record]
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, tap_grad: torch.Tensor | None = None) -> Any:
        tensors, start, record = ctx.saved_tensors, 0, []
        for count, facts in ctx.facts:
            record.append(Saved(tensors[start : start + count], facts, tap_grad))
            start += count
            tap_grad = None  # the first stage's alone
        if grad is not None:
            grad = grad.contiguous()
        grads = ctx.chain.backward(grad, record, ctx.run)
        if ctx.run.ends_backward:
            autocast_stack().end_backward()
        return (None, None, *grads)


# Function.apply first looks for functorch transforms, which costs 3 us a call; this is what it
# calls where there are none.
_bare_apply = super(torch.autograd.Function, _ChainFunction).apply


def _apply(*arguments: Any) -> Any:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _ChainFunction.apply(*arguments)
    return _bare_apply(*arguments)
