"""Calls of chains, and the autograd function that makes each of them one node of the graph.

Autograd does not look into the chain: the segments compute forward and backward. But the tensors
that stages save for the backward are saved by autograd, so that its hooks see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch import _torch_private
from transformer_engine.pytorch.chain import segments
from transformer_engine.pytorch.chain.chain import Targets, run_exported, wgrad_targets
from transformer_engine.pytorch.chain.main_grad_uses import MARKS
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage_by_stage import contiguous_values
from transformer_engine.pytorch.fp8.autocast_stack import Step
from transformer_engine.pytorch.parallel.dtensors import is_unfinished, wait_tensor

_Tensor = torch.Tensor


def call_chain(plan: CallPlan, step: Step | None, *inputs: Any) -> Any:
    """Run a chain forward, recorded by autograd where a gradient is wanted.

    Args:
        plan: the plan of the call.
        step: the autocast step that ends with the backward of this call, or None.
        inputs: the values that come in, then all parameters.

    Returns:
        What the chain returns: one value, or a tuple.

    Raises:
        NotImplementedError: functorch transforms the call, an input has a tangent, or TorchScript
            traces it.
    """
    if (plan.compiling or plan.operator) and _torch_private.transforms_active():
        # Dynamo of torch 2.13 and older drops the backward of autograd functions in transforms.
        _torch_private.refuse_transforms(plan.chain.layer)
    if plan.operator:
        made = torch.ops.te.chain(plan.operator, contiguous_values(inputs), [*plan.state])
        return made[0] if len(made) == 1 else tuple(made)
    if not plan.compiling:
        if _torch_private.other_caller_active():
            _torch_private.refuse_other_caller(plan.chain.layer, inputs)
        values = inputs[: plan.chain.inputs]
        if any([x is not None and (type(x) is not _Tensor or x.is_neg()) for x in values]):
            inputs = tuple([_with_memory(x) for x in inputs])
    if plan.dropping:
        plan.drop_caches()
    if plan.requires_grad:
        if not (plan.compiling or _torch_private.transforms_active()):
            return _apply(plan, step, *inputs)
        results = _by_node(plan, step, inputs)
    elif plan.exporting:
        results = run_exported(plan, inputs)
    else:
        results = segments.forward(plan, inputs)[0]
    if plan.compiling and plan.columns is not None:
        plan.columns.record_amaxes(results[0])
    return results[0] if len(results) == 1 else tuple(results)


def _by_node(plan: CallPlan, step: Step | None, inputs: Any) -> Sequence[Any]:
    """The results of a chain that `_ChainNode` runs."""
    results: Any = _ChainNode.apply(plan, step, *inputs)
    for stage, _ in plan.caching:
        stage.detach_cache()
    return results if len(plan.chain.outputs) > 1 else (results,)


class _ChainNode(torch.autograd.Function):
    """Forward and backward of a chain. The tensors that stages save go through autograd."""

    @staticmethod
    def forward(ctx: Any, plan: CallPlan, step: Step | None, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        targets = wgrad_targets(plan, inputs) if plan.accumulates else _NO_TARGETS
        results, tensors, traces = segments.forward(plan, inputs)
        ctx.call = plan, step, targets, traces
        ctx.save_for_backward(*tensors)
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        plan = ctx.call[0]
        if plan.compiling and not torch.compiler.is_compiling():
            with _torch_private.compiling():
                return (None, None, *_backward(ctx, grads))
        if plan.compiling or not torch.is_grad_enabled():
            return (None, None, *_backward(ctx, grads))
        with torch.no_grad():
            found = _backward(ctx, grads)
        return (None, None, *_torch_private.not_differentiable(found, plan.chain.layer))


def _backward(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """Gradients of the values that came in, and of all parameters."""
    plan, step, targets, traces = ctx.call
    contiguous = [g if g is None else _readable(g, plan.compiling) for g in grads]
    tensors = list(ctx.saved_tensors)
    # Without a gradient of the first result no product has one.
    if targets and not plan.compiling and MARKS and grads[0] is not None:
        targets = {i: target.settled() for i, target in targets.items()}
    if not plan.compiling:
        _torch_private.release_saved_tensors(ctx)
    try:
        found = segments.backward(plan, contiguous, tensors, traces, targets)
    except RuntimeError:
        if not plan.compiling:  # a backward under vmap is looked for only after an error
            _torch_private.refuse_other_caller(plan.chain.layer, grads)
        raise
    for i, target in targets.items():
        weight = plan.chain.steps[i].parameters.start
        if found[weight] is None:
            found[weight] = target.placeholder()
    if step is not None:
        step.end_backward()
    return found


def _with_memory(x: Any) -> Any:
    """`x` with its negative bit resolved, after the functional collective that it comes from."""
    if x is None:
        return None
    x = wait_tensor(x) if is_unfinished(x) else x
    return x.resolve_neg() if x.is_neg() else x


def _readable(x: torch.Tensor, compiling: bool) -> torch.Tensor:
    """`x` made contiguous, its negative bit resolved; compilers resolve that bit themselves."""
    if type(x) is not _Tensor and not compiling and is_unfinished(x):
        x = wait_tensor(x)
    ordered = x if x.is_contiguous() else x.contiguous()
    return ordered if compiling or not ordered.is_neg() else ordered.resolve_neg()


_NO_TARGETS: Targets = {}
_apply = _torch_private.bare_apply(_ChainNode)
