"""A layer as one operator of compiled code, which runs the chain that eager calls run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.chain.compiled import operator_key
from transformer_engine.pytorch.chain.flow import Arguments, ListingFlow, NotOneChain, is_observed
from transformer_engine.pytorch.chain.fused_layer import backward_end_of
from transformer_engine.pytorch.chain.part import Incoming
from transformer_engine.pytorch.chain.stage_by_stage import contiguous_values
from transformer_engine.pytorch.dtypes import autocast_dtype
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack


class _Gathering(ListingFlow):
    """Gathers the facts, parameters and scaling state of all parts, for one operator.

    Dynamo traces this code.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        super().__init__(len(values))
        self._values = values
        self._records = torch.is_grad_enabled()
        self._needs = [self._records and x.requires_grad for x in values]
        self.parts: list[Any] = []
        self.differentiable: list[Any] = []  # the parts that need a backward
        self.parameters: list[torch.Tensor | None] = []
        self.state: list[torch.Tensor] = []

    def admit(self, condition: Callable[[str], bool]) -> None:
        """See `Flow.admit`."""
        if not condition(self._values[0].device.type):
            raise NotOneChain

    def add(
        self,
        part: Any,
        inputs: tuple[int, ...],
        likes: tuple[int, ...],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> tuple[int, ...]:
        """Add the facts, the parameters and the scaling state of a part."""
        chain = part.chain
        if not chain.kind:
            raise NotOneChain
        tensors = tuple([self._values[i] for i in likes])
        needs = tuple([self._needs[v] for v in inputs])
        coming = Incoming(tensors, needs, self._records, in_operator=True)
        planned = part.plan_call(coming, *arguments, **keywords)
        if planned is None:
            raise NotOneChain
        plan, parameters = planned
        facts = plan.facts
        if facts is None:
            described = chain.steps[0].stage.describe_options(plan.options)
            if plan.quantizers or described is None:
                raise NotOneChain
            rooms = len(plan.state or ())
            flush = rooms > 0 and autocast_stack().entered_in_graph
            facts = (chain.kind, plan.dtype, plan.needs, (), rooms, described, self._records, flush)
            chain.keep_template()
        self.parts.append((facts, inputs, likes))
        if plan.requires_grad:
            self.differentiable.append(part)
        self.parameters += parameters
        self.state += plan.state or ()
        made = tuple(range(len(self._needs), len(self._needs) + len(chain.outputs)))
        self._needs += [plan.requires_grad] * len(made)
        return made


def call_operator(layer: Any, values: Sequence[torch.Tensor], groups: Arguments) -> Any:
    """Call a layer as one operator; `NotImplemented` where it must be called part by part."""
    stack = autocast_stack()
    if (
        stack.exports_inference
        or stack.in_compiled_checkpoint
        or autocast_dtype(values[0]) is not None
    ):
        return NotImplemented
    flow = _Gathering(values)
    try:
        outputs = layer.data_flow(flow, tuple(range(len(values))), *groups)
    except NotOneChain:
        return NotImplemented
    if any([is_observed(module) for module in flow.modules]):
        return NotImplemented
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    key = operator_key(len(values), tuple(flow.parts), outputs)
    backward_end_of(flow.differentiable)
    inputs = contiguous_values([*values, *flow.parameters])
    made = torch.ops.te.chain(key, inputs, flow.state)
    return made[0] if len(made) == 1 else tuple(made)
