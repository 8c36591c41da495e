"""Decides whether a layer runs as one node of autograd's graph, or as one node for each part.

A layer defines in `data_flow` what it computes, once: it calls modules and runs parts. With `EAGER`
these run one after the other, as in any PyTorch code. If nobody observes a part and the time of the
call is host time, the same `data_flow` lists the stages of all parts as one chain, run as one node.

A layer runs part by part where

    code is traced or transformed: torch.compile, export to ONNX, functorch;
    the first input is too large to be `is_host_bound`: parts give memory back earlier;
    somebody observes a part: a hook on it or on all modules, a subclass, a `forward` that was
        replaced on the object or its class, a compiled module, parametrisation, another class;
    somebody waits for the gradient of a parameter: a hook on it, or DistributedDataParallel;
    saved tensors pass through hooks (offloading), or the call is in a checkpoint in FP8;
    torch.autocast is on;
    ranks share it: each of its collectives ends a part;
    a part has no chain for its arguments: a cache of keys and values, FP8 attention,
        recomputation, a bias that is returned.

Both ways give the same results, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from transformer_engine.pytorch import _torch_private
from transformer_engine.pytorch.chain.chain import Chain, ChainBuilder
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.part import Incoming, Planned
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.segments import is_host_bound
from transformer_engine.pytorch.dtypes import autocast_dtype
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.fp8.recompute_regions import may_recompute
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.parallel.construction import Remakable

_MOST_PLANS = 16
Arguments = Sequence[dict[str, Any]]
_FORWARDS: dict[type, Any] = {}  # `forward` of each class that `joins_chains`


def joins_chains(module: type[nn.Module]) -> type[nn.Module]:
    """Let modules of this class (not of subclasses) run as a part of a larger chain, uncalled."""
    _FORWARDS[module] = module.forward
    return module


class FlowModule(Remakable, nn.Module):
    """Base of layers that define their computation in `data_flow`.

    Attributes:
        data_flow: `data_flow(flow, values, *groups)` computes the results of the layer from the
            values that come in and groups of arguments.
        flow_key: `flow_key()` returns what `data_flow` depends on beside its arguments.
    """

    data_flow: Callable[..., Any]
    flow_key: Callable[[], Hashable]

    def __init__(self) -> None:
        super().__init__()
        self._fused: dict[Hashable, _FusedLayer] = {}  # by what `data_flow` depends on

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor parallel group; see `Linear.set_tensor_parallel_group`."""
        child: Any
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fused": {}}


class Flow:
    """Runs the modules and parts of a `data_flow` one after the other."""

    def call(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a module with values and further arguments."""
        return module(*arguments, **keywords)

    def run(self, part: Any, *arguments: Any) -> Any:
        """Run a `Part` with values and further arguments."""
        return part(*arguments)


EAGER = Flow()


class _Argument(NamedTuple):
    """Placeholder for an argument of later calls, while a `data_flow` lists its stages."""

    group: int
    name: str


class _NotFused(Exception):
    """The layer cannot be one chain: one of its modules must be called."""


class _Member(NamedTuple):
    """A part or module of a fused layer.

    Attributes:
        part: with `chain` and `plan_call`.
        inputs: numbers of the values that it reads.
        outputs: numbers of the values that it makes.
        likes: for each input, the number of an input of the layer with the same tokens.
        arguments: further positional arguments, some of them `_Argument`.
        keywords: keyword arguments, likewise.
    """

    part: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    likes: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def plan_call(
        self, values: Sequence[Any], needs: Sequence[bool], records: bool, groups: Arguments
    ) -> Planned | None:
        """Plan and parameters of this member in a call of the layer."""
        likes = tuple([values[i] for i in self.likes])
        coming = Incoming(likes, tuple([needs[v] for v in self.inputs]), records)
        if not (self.arguments or self.keywords):
            planned: Planned | None = self.part.plan_call(coming)
            return planned
        arguments = [_resolved(one, groups) for one in self.arguments]
        keywords = {name: _resolved(one, groups) for name, one in self.keywords.items()}
        return self.part.plan_call(coming, *arguments, **keywords)


def _resolved(argument: Any, groups: Arguments) -> Any:
    return groups[argument.group][argument.name] if type(argument) is _Argument else argument


class _Listing(Flow):
    """Lists the stages of a `data_flow` without running them. Values are numbers."""

    def __init__(self, values: Sequence[str]) -> None:
        self.built = ChainBuilder(*values)
        self.members: list[_Member] = []
        self.modules: list[nn.Module] = []
        self._likes = {i: i for i in range(len(values))}

    def call(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        """Add the chain of a module, or the modules that a layer calls."""
        self.modules.append(module)
        if type(module) not in _FORWARDS:
            raise _NotFused
        if getattr(module, "return_bias", False):
            raise _NotFused
        if hasattr(module, "data_flow"):
            return module.flow_of_call(self, *arguments, **keywords)
        return self._add(module, arguments, keywords)

    def run(self, part: Any, *arguments: Any) -> Any:
        """Add the chain of a part."""
        return self._add(part, arguments, {})

    def _add(self, part: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if part.chain.communicates:
            raise _NotFused
        count = part.chain.inputs
        inputs = arguments[:count]
        if None in inputs:  # an error, perhaps, which the part itself raises
            raise _NotFused
        outputs = self.built.add_part(part.chain, *inputs)
        likes = tuple([self._likes[v] for v in inputs])
        self._likes.update({v: likes[min(i, count - 1)] for i, v in enumerate(outputs)})
        member = _Member(part, inputs, tuple(outputs), likes, arguments[count:], keywords)
        self.members.append(member)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class _FusedLayer:
    """A layer as one chain, for calls with the same arguments.

    Args:
        layer: with a `data_flow`.
        values: names of the values that come in.
        groups: arguments of one of these calls; the names count, not the values.
    """

    def __init__(self, layer: Any, values: Sequence[str], groups: Arguments) -> None:
        listing = _Listing(values)
        symbols = [{name: _Argument(i, name) for name in group} for i, group in enumerate(groups)]
        self.chain: Chain | None = None
        try:
            made = layer.data_flow(listing, tuple(range(len(values))), *symbols)
        except _NotFused:
            made = ()
        else:
            self.chain = listing.built.chain(*(made if isinstance(made, tuple) else (made,)))
            self.chain.layer = layer.name
        self.members = listing.members
        self.modules = [module for module in listing.modules if type(module) in _FORWARDS]
        parents = [layer, *self.modules]
        self._children = [(m._modules, [*m._modules.values()]) for m in parents if m._modules]
        self._plans: dict[Hashable, CallPlan] = {}

    def is_current(self) -> bool:
        """Whether the layer still has the same modules."""
        return all([[*now.values()] == then for now, then in self._children])

    def __call__(self, values: Sequence[Any], groups: Arguments) -> Any:
        """Run the layer; `NotImplemented` where it must run part by part."""
        chain = self.chain
        if chain is None or any([_is_observed(module) for module in self.modules]):
            return NotImplemented
        records = torch.is_grad_enabled()
        needs = [records and x.requires_grad for x in values]
        needs += [False] * (len(chain.names) - chain.arguments)
        plans: list[CallPlan] = []
        inputs = [*values]
        for member in self.members:
            planned = member.plan_call(values, needs, records, groups)
            if planned is None:
                return NotImplemented
            plan, parameters = planned
            if plan.requires_grad and _waits_for_gradients(parameters):
                return NotImplemented
            plans.append(plan)
            inputs += parameters
            for v in member.outputs:
                needs[v] = plan.requires_grad
        key = (*needs[: len(values)], *plans)
        joined = self._plans.get(key)
        if joined is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            joined = self._plans[key] = _joined(chain, plans, tuple(needs[: len(values)]))
        step = None
        if joined.requires_grad and autocast_stack().step.first_pending:
            for member, plan in zip(self.members, plans, strict=True):
                if plan.requires_grad and isinstance(member.part, ScaledModule):
                    step = step or member.part.take_backward_end()
        return call_chain(joined, step, *inputs)


def _joined(chain: Chain, plans: Sequence[CallPlan], needs: tuple[bool, ...]) -> CallPlan:
    """Join the plans of the parts of a chain into the plan of the chain."""
    joined = CallPlan(plans[0].dtype, needs)
    joined.chain = chain
    joined.recordings = {}
    first = chain.inputs
    for plan in plans:
        shift = first - plan.chain.inputs
        joined.needs += plan.needs[plan.chain.inputs :]
        joined.fp8_weights += tuple([i + shift for i in plan.fp8_weights])
        joined.accumulates |= plan.accumulates
        joined.stage_plans = [*joined.stage_plans, *plan.stage_plans]
        joined.differentiable = [*joined.differentiable, *plan.differentiable]
        joined.caching = [*joined.caching, *plan.caching]
        first += plan.chain.arguments - plan.chain.inputs
    joined.requires_grad = any(joined.differentiable)
    return joined


def _is_observed(module: Any) -> bool:
    """Whether hooks observe a module, or its `forward` was replaced."""
    return (
        _FORWARDS.get(type(module)) is not type(module).forward
        or "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
    )


def _waits_for_gradients(parameters: Sequence[Any]) -> bool:
    """Whether a parameter has hooks, which run as soon as its gradient is there."""
    for parameter in parameters:
        if parameter is not None and (
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ):
            return True
    return False


def _may_fuse(x: torch.Tensor) -> bool:
    """Whether a layer with this first input may run as one node."""
    return not (
        not is_host_bound(x)
        or not x.numel()
        or x.is_meta
        or _torch_private.transforms_active()
        or _torch_private.has_global_module_hooks()
        or _torch_private.saved_tensors_hooks_active()
        or _torch_private.in_distributed_data_parallel()
        or may_recompute(autocast_stack())
        or autocast_dtype(x) is not None
        or exporting()
    )


def run_layer(
    layer: FlowModule, names: Sequence[str], values: Sequence[torch.Tensor], *groups: dict[str, Any]
) -> Any:
    """Run a layer's `data_flow`, as one node of autograd's graph or part by part.

    Args:
        layer: to run.
        names: of the values, for errors.
        values: the values that come in.
        groups: further arguments by name, those that differ from their defaults.
    """
    if torch.compiler.is_compiling():
        return layer.data_flow(EAGER, values, *groups)
    try:
        if _may_fuse(values[0]):
            key = (len(values), layer.flow_key(), *[tuple(group) for group in groups])
            fused = layer._fused.get(key)
            if fused is None or not fused.is_current():
                fused = layer._fused[key] = _FusedLayer(layer, names, groups)
            result = fused(values, groups)
            if result is not NotImplemented:
                return result
        return layer.data_flow(EAGER, values, *groups)
    except (TypeError, ValueError):
        _check_values(layer, names, values)
        raise


def _check_values(layer: FlowModule, names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
    """Raise if device or dtype of a value differ from those of the layer's parameters.

    Called after a part has failed: its error names an argument of the part, not of the layer.
    """
    kind, like = type(layer).__name__, next(layer.parameters())
    for name, x in zip(names, values, strict=True):
        if x.device != like.device:
            raise ValueError(
                f"[{kind}] expected {name} on {like.device}, where the parameters are, got"
                f" {x.device}"
            ) from None
        if x.dtype != like.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"[{kind}] Data types for parameters must match when outside of autocast: expected"
                f" {name} of {like.dtype}, the parameters' dtype, got {x.dtype}"
            ) from None
