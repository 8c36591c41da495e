"""Casts the weights of several stages with one kernel, before the first of them runs.

A launch takes longer than the cast of a small weight. The results equal those of separate casts,
but the codes live a little longer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest, Operands


class CastWeight(NamedTuple):
    """What a stage gets in place of its weight, if that has been cast before."""

    weight: torch.Tensor
    operands: Operands


class CachedWeight(NamedTuple):
    """An FP8 weight that a stage keeps between micro-batches.

    Attributes:
        key: `Quantizer.cache_key` of its quantizer.
        operands: the weight.
        tensors: the tensors of the operands.
    """

    key: Hashable
    operands: Operands
    tensors: tuple[torch.Tensor | None, ...]

    def can_take(self, other: CachedWeight | None) -> bool:
        """Whether `other` has all that this one has, cast alike."""
        if other is None or other.key != self.key:
            return False
        pairs = zip(self.tensors, other.tensors, strict=True)
        return not any([own is not None and new is None for own, new in pairs])

    def take(self, other: CachedWeight) -> None:
        """Copy `other` to the memory of this one."""
        if other is self:
            return
        with torch.no_grad():
            for own, new in zip(self.tensors, other.tensors, strict=True):
                if own is not None and new is not None:
                    own.copy_(new)


def unpacked(weight: Any) -> tuple[torch.Tensor, Operands | None]:
    """A weight, and its operands if it has been cast before."""
    return weight if type(weight) is CastWeight else (weight, None)


def cast_weights(plan: CallPlan, values: list[Any], start: int, stop: int) -> dict[int, list[Any]]:
    """The parameters of steps whose weights have been cast together, by the number of the step.

    The steps are `start` to `stop - 1`; `values` are those of the chain, parameters included.
    """
    batches: dict[Hashable, list[tuple[int, OperandRequest]]] = {}
    steps, plans = plan.chain.steps, plan.stage_plans
    for i in range(start, stop):
        request = steps[i].stage.weight_request(plans[i])
        key = None if request is None else _key(values[steps[i].parameters.start], request)
        if request is not None and key is not None:
            batches.setdefault(key, []).append((i, request))
    found = {}
    for batch in batches.values():
        if len(batch) > 1:
            parameters = [values[steps[i].parameters] for i, _ in batch]
            weights, requests = [own[0] for own in parameters], [request for _, request in batch]
            quantizer: Any = requests[0].quantizer
            cast = quantizer.cast_many(weights, requests)
            for (i, _), own, operands in zip(batch, parameters, cast, strict=True):
                found[i] = [CastWeight(own[0], operands), *own[1:]]
    return found


def _key(weight: torch.Tensor, request: OperandRequest) -> Hashable | None:
    """Weights with equal keys are cast together; None if a weight must be cast alone."""
    quantizer, sides = request.quantizer, (request.rowwise, request.columnwise)
    described = quantizer.description() if quantizer.casts_many else None
    if described is None:
        return None
    # Under delayed scaling a quantizer has a scale, and an amax only if the call is recorded.
    return described, weight.dtype, sides, len(quantizer.persistent_tensors())
