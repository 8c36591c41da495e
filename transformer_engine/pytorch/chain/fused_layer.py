"""`FusedLayer`: the parts of a layer as one chain, so that a call is one node of the graph.

The `data_flow` of the layer runs once on numbers instead of tensors. This lists the modules and
parts that it calls, and joins their stages to one chain. In each call these members plan their
stages as if they were called alone, and the plans are joined, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.chain import Chain, ChainBuilder
from transformer_engine.pytorch.chain.flow import Arguments, ListingFlow, NotOneChain, is_observed
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.part import AddingPart, Incoming, Planned
from transformer_engine.pytorch.chain.plan import (
    CLOSED,
    CallPlan,
    Recordings,
    add_plan,
    joined_plan,
)
from transformer_engine.pytorch.fp8.autocast_stack import Step, autocast_stack
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule

_MOST_PLANS = 256  # attention has one for each sequence length


class _Argument(NamedTuple):
    """Placeholder for an argument of later calls, while a `data_flow` lists its stages."""

    group: int
    name: str


class _Member(NamedTuple):
    """A part or module of a fused layer.

    Attributes:
        part: the part or module, with `chain` and `plan_call`.
        inputs: numbers of the values that it reads.
        outputs: numbers of the values that it makes.
        likes: for each input, an index into `FusedLayer.likes`.
        arguments: further positional arguments, some of them `_Argument`.
        keywords: keyword arguments, some of them `_Argument`.
    """

    part: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    likes: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def plan_call(
        self, likes: Sequence[Any], needs: Sequence[bool], records: bool, groups: Arguments
    ) -> Planned | None:
        """Plan and parameters of this member in a call of the layer."""
        own = tuple([likes[i] for i in self.likes])
        coming = Incoming(own, tuple([needs[v] for v in self.inputs]), records)
        if not (self.arguments or self.keywords):
            return self.part.plan_call(coming)
        arguments = [_resolved(one, groups) for one in self.arguments]
        keywords = {name: _resolved(one, groups) for name, one in self.keywords.items()}
        return self.part.plan_call(coming, *arguments, **keywords)


def _resolved(argument: Any, groups: Arguments) -> Any:
    return groups[argument.group][argument.name] if type(argument) is _Argument else argument


class _Listing(ListingFlow):
    """Lists the stages of a `data_flow`, as one chain."""

    def __init__(self, values: Sequence[str]) -> None:
        super().__init__(len(values))
        self.built = ChainBuilder(*values)
        self.members: list[_Member] = []
        self.likes: list[tuple[int, Fraction | int]] = []

    def add(
        self,
        part: Any,
        inputs: tuple[int, ...],
        likes: tuple[int, ...],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> tuple[int, ...]:
        """Add the stages of a part."""
        shapes = [(like, self.built.tokens[v]) for like, v in zip(likes, inputs, strict=True)]
        self.likes += [shape for shape in shapes if shape not in self.likes]
        numbers = tuple([self.likes.index(shape) for shape in shapes])
        outputs = tuple(self.built.add_part(part.chain, *inputs))
        self.members.append(_Member(part, inputs, outputs, numbers, arguments, keywords))
        return outputs


def _with_tokens(x: torch.Tensor, ratio: Fraction | int) -> torch.Tensor:
    """A tensor like `x` with `ratio` times as many tokens, in the memory of one element."""
    if ratio == 1:
        return x
    return x.new_empty_strided((int(x.shape[0] * ratio), *x.shape[1:]), (0,) * x.dim())


class Outdated(Exception):
    """A module of the layer has another chain now, because one of its settings was set."""


class FusedLayer:
    """A layer as one chain, for calls with the same arguments.

    Args:
        layer: the layer, with a `data_flow`.
        values: names of the values that come in.
        groups: arguments of one of these calls; only their names matter here.

    Attributes:
        chain: the chain of the whole layer; None if the layer cannot be one chain.
        likes: describes the tensors with which parts are planned. Each entry has the number of a
            value that comes in, and how many times as many tokens the tensor has.
    """

    def __init__(self, layer: Any, values: Sequence[str], groups: Arguments) -> None:
        listing = _Listing(values)
        symbols = [{name: _Argument(i, name) for name in group} for i, group in enumerate(groups)]
        self.chain: Chain | None = None
        try:
            made = layer.data_flow(listing, tuple(range(len(values))), *symbols)
        except NotOneChain:
            made = ()
        else:
            self.chain = listing.built.chain(*(made if isinstance(made, tuple) else (made,)))
            self.chain.layer = layer.name
        self.members, self.likes = listing.members, listing.likes
        self._chains = [member.part.chain for member in self.members]
        if self.chain is not None:
            self.chain.most_shapes = min([chain.most_shapes for chain in self._chains])
        self.modules = listing.modules
        parents = [layer, *self.modules]
        self._children = [(m._modules, [*m._modules.values()]) for m in parents if m._modules]
        self._plans: dict[Hashable, CallPlan] = {}
        self._recordings = Recordings()

    def is_current(self) -> bool:
        """Whether the layer still has the same modules."""
        return all([[*now.values()] == then for now, then in self._children])

    def __call__(self, values: Sequence[Any], groups: Arguments) -> Any:
        """Run the layer; `NotImplemented` where it must run part by part.

        Raises:
            Outdated: the stages of the layer must be listed again.
        """
        chain = self.chain
        if chain is None or any([is_observed(module) for module in self.modules]):
            return NotImplemented
        records = torch.is_grad_enabled()
        needs = [records and x.requires_grad for x in values]
        needs += [False] * (len(chain.names) - chain.arguments)
        plans: list[CallPlan] = []
        inputs = [*values]
        likes = [_with_tokens(values[i], ratio) for i, ratio in self.likes]
        for member in self.members:
            planned = member.plan_call(likes, needs, records, groups)
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
            pairs = zip(plans, self._chains, strict=True)
            if any([plan.chain is not chain for plan, chain in pairs]):
                raise Outdated
            joined = joined_plan(chain, plans, tuple(needs[: len(values)]))
            closed = any([plan.recordings is CLOSED for plan in plans])
            joined.members, joined.recordings = key, CLOSED if closed else self._recordings
            add_plan(self._plans, key, joined, _MOST_PLANS)
        trained = zip(self.members, plans, strict=True)
        step = backward_end_of([member.part for member, plan in trained if plan.requires_grad])
        return call_chain(joined, step, *inputs)


def backward_end_of(parts: Sequence[Any]) -> Step | None:
    """The autocast step that ends with the backward of these parts, or None."""
    if not autocast_stack().step.first_pending:
        return None
    for part in parts:
        module = part.module if isinstance(part, AddingPart) else part
        if isinstance(module, ScaledModule) and (step := module.take_backward_end()) is not None:
            return step
    return None


def _waits_for_gradients(parameters: Sequence[Any]) -> bool:
    """Whether a parameter has hooks, which run as soon as its gradient is there."""
    for parameter in parameters:
        if parameter is not None and (
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ):
            return True
    return False
