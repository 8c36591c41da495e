"""`Part`: a chain that belongs to no module, with the plans of its calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.plan import CallPlan, add_plan

_MOST_PLANS = 256  # attention has one for each sequence length
Planned = tuple[CallPlan, Sequence[torch.Tensor | None]]  # plan and parameters of a call


class Incoming(NamedTuple):
    """The values that come into a call, as far as a plan depends on them.

    Attributes:
        likes: for each value a tensor of its device, dtype and sizes; the last size may differ.
        needs: for each value whether it needs a gradient.
        records: gradients are enabled.
        in_operator: an operator of compiled code runs the call; its stages make no plans here.
    """

    likes: tuple[torch.Tensor, ...]
    needs: tuple[bool, ...]
    records: bool
    in_operator: bool = False

    @property
    def like(self) -> torch.Tensor:
        """The entry of `likes` for the first value."""
        return self.likes[0]

    def with_parameters(self, parameters: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
        """`CallPlan.needs` of a call with these parameters."""
        if not self.records:
            return (False,) * (len(self.needs) + len(parameters))
        return (*self.needs, *[t is not None and t.requires_grad for t in parameters])


def incoming(*values: torch.Tensor | None) -> Incoming:
    """`Incoming` of values that exist; the first one is not None."""
    likes: Any = values
    if not torch.is_grad_enabled():
        return Incoming(likes, (False,) * len(values), False)
    return Incoming(likes, tuple([x is not None and x.requires_grad for x in values]), True)


class AddingPart:
    """Calls of a module that add a residual, see `Flow.call_adding`, as a part of a chain."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def chain(self) -> Chain:
        """The chain that adds."""
        return self.module.chain.adding

    def plan_call(
        self, values: Incoming, is_first_microbatch: bool | None = None
    ) -> Planned | None:
        """See `TransformerEngineBaseModule`."""
        return self.module.plan_call(values, is_first_microbatch, adds=True)


class Part:
    """Runs a chain on values, like a module, but without hooks, name or parameters of its own.

    Args:
        chain: the chain; its stages read their settings from `CallPlan.options`.
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
        """The plan of a call with these parameters and options.

        The options are hashable, see `CallPlan.options`. None as `needs` takes them from the values
        and parameters.
        """
        dtype = values.like.dtype
        needs = values.with_parameters(parameters) if needs is None else needs
        if torch.compiler.is_compiling():
            if values.in_operator:  # plans of stages would become guards of the graph
                return self._plan_with(dtype, needs, options), parameters
            return self._prepared(dtype, needs, options), parameters
        key = (dtype, needs, options)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._prepared(dtype, needs, options)
            add_plan(self._plans, key, plan, _MOST_PLANS)
        return plan, parameters

    def drop_plans(self) -> None:
        """Drop all plans and recordings."""
        self._plans.clear()

    def _prepared(self, dtype: torch.dtype, needs: tuple[bool, ...], options: Any) -> CallPlan:
        return self.chain.prepare(self._plan_with(dtype, needs, options))

    @staticmethod
    def _plan_with(dtype: torch.dtype, needs: tuple[bool, ...], options: Any) -> CallPlan:
        plan = CallPlan(dtype, needs)
        plan.options = options
        return plan

    def __call__(self, *values_and_arguments: Any) -> Any:
        """Run the chain as one node of autograd's graph."""
        values = values_and_arguments[: self.chain.inputs]
        arguments = values_and_arguments[self.chain.inputs :]
        plan, parameters = self.plan_call(incoming(*values), *arguments)
        return call_chain(plan, None, *values, *parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}
