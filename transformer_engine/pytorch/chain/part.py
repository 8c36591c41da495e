"""`Part`: stages that belong to no module of their own, with the plans of their calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.plan import CallPlan

_MOST_PLANS = 64
Planned = tuple[CallPlan, Sequence[torch.Tensor | None]]  # a call: its plan, and its parameters


class Incoming(NamedTuple):
    """The values that come into a call, as far as a plan depends on them.

    Attributes:
        likes: for each a tensor with its device, its dtype, and its sizes but for the features.
        needs: whether a gradient is wanted, of each.
        records: autograd records the call, if anything in it needs a gradient.
    """

    likes: tuple[torch.Tensor, ...]
    needs: tuple[bool, ...]
    records: bool

    @property
    def like(self) -> torch.Tensor:
        """Of the first value."""
        return self.likes[0]

    def with_parameters(self, parameters: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
        """`CallPlan.needs` of a chain with these parameters."""
        if not self.records:
            return (False,) * (len(self.needs) + len(parameters))
        return (*self.needs, *[t is not None and t.requires_grad for t in parameters])


def incoming(*values: torch.Tensor | None) -> Incoming:
    """Of values at hand; the first one is there."""
    likes: Any = values
    if not torch.is_grad_enabled():
        return Incoming(likes, (False,) * len(values), False)
    return Incoming(likes, tuple([x is not None and x.requires_grad for x in values]), True)


class Part:
    """Runs a chain on values, as a module does, but without hooks, name or parameters of its own.

    Args:
        chain: whose stages read `options` of their call.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._plans: dict[Hashable, CallPlan] = {}

    def plan_call(self, values: Incoming, *arguments: Any) -> Planned:
        """The plan of a call on `values`, and the parameters of the chain."""
        raise NotImplementedError

    def planned(
        self,
        values: Incoming,
        parameters: Sequence[torch.Tensor | None],
        options: Any,
        needs: tuple[bool, ...] | None = None,
    ) -> Planned:
        """The plan for these parameters; options are hashable, `needs` may be derived from both."""
        dtype = values.like.dtype
        needs = values.with_parameters(parameters) if needs is None else needs
        if torch.compiler.is_compiling():
            return self._prepared(dtype, needs, options), parameters
        key = (dtype, needs, options)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._prepared(dtype, needs, options)
        return plan, parameters

    def _prepared(self, dtype: torch.dtype, needs: tuple[bool, ...], options: Any) -> CallPlan:
        plan = CallPlan(dtype, needs)
        plan.options = options
        return self.chain.prepare(plan)

    def __call__(self, *values_and_arguments: Any) -> Any:
        """Run it on its own: one node of autograd's graph."""
        values = values_and_arguments[: self.chain.inputs]
        arguments = values_and_arguments[self.chain.inputs :]
        plan, parameters = self.plan_call(incoming(*values), *arguments)
        return call_chain(plan, None, *values, *parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}
