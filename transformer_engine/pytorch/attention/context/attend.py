"""Attention of a rank's queries with keys that arrive in steps, forward and backward.

In each step the rank has some chunks of keys and values. The blocks of the score matrix that these
keys have in common with the rank's queries are parts: each runs on a backend, and its result is
merged with those of earlier parts. The backward visits the same parts. It gives each of them the
merged result and the log-sum-exp over all keys, and adds up the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.backends.backend import Backend, Gradients, Needs, Saved
from transformer_engine.pytorch.attention.context.merging import (
    GradSum,
    OutputMerger,
    add_bias_gradient,
    sink_gradient,
)
from transformer_engine.pytorch.attention.context.parts import (
    AttentionPart,
    RankCall,
    SavedPart,
    part_backward,
    part_forward,
)
from transformer_engine.pytorch.attention.context.score_blocks import Chunks
from transformer_engine.pytorch.attention.core.call import TENSORS, Call, CallTensors
from transformer_engine.pytorch.kernels.memory import contiguous


class KeyValues(NamedTuple):
    """The keys and values that a rank has in one step.

    Attributes:
        step: number of the step in the forward. The backward may run the steps in another order.
        chunks: the chunks of the sequence that these keys are.
        key: keys in the format of the call; in FP8 attention, codes.
        value: values, in the same form.
    """

    step: int
    chunks: Chunks
    key: torch.Tensor
    value: torch.Tensor


class _PartRecord(NamedTuple):
    """A part that ran in the forward; `tensors` is its range in the list of all parts' tensors."""

    step: int
    backend: Backend
    facts: Any
    tensors: slice


def attend(
    rank_call: RankCall, steps: Iterable[KeyValues], inputs: Sequence[torch.Tensor], needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """The forward of a backend, see `backends/__init__.py`.

    `steps` are the keys and values of each step; `inputs` are query, key and value of this rank,
    FP8 codes where the call has `qkv_scales`.
    """
    call, query = rank_call.call, inputs[0]
    merger = OutputMerger(rank_call, query)
    tensors: list[Any] = []
    records: list[_PartRecord] = []
    for step in steps:
        for part in rank_call.parts(step.chunks):
            part_inputs = _inputs(rank_call, part, query, step)
            found = part_forward(part_inputs, part, needs, rank_call.device)
            out, log_sum_exp, (backend, saved) = found
            merger.add(part.block.queries, out, log_sum_exp)
            if any(needs):
                own = slice(len(tensors), len(tensors) + len(saved.tensors))
                records.append(_PartRecord(step.step, backend, saved.facts, own))
                tensors += saved.tensors
    out, log_sum_exp = merger.result(call.sink.offset)
    if not any(needs):
        return out, None
    return out, Saved(log_sum_exp, (*inputs, out, *call.tensors, *tensors), records)


def _inputs(
    rank_call: RankCall, part: AttentionPart, query: torch.Tensor, step: KeyValues
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    queries, keys = part.block.queries, part.block.keys
    return (
        rank_call.narrow(query, queries),
        rank_call.narrow(step.key, keys),
        rank_call.narrow(step.value, keys),
    )


def with_saved_tensors(call: Call, saved: Saved) -> Call:
    """The settings of a call, with the tensors of the call that `attend` saved."""
    return call.with_tensors(CallTensors(*saved.tensors[4 : 4 + TENSORS]))


class Backward:
    """The backward of `attend`, step by step."""

    def __init__(self, rank_call: RankCall, grad: torch.Tensor, saved: Saved, needs: Needs) -> None:
        self.rank_call, self.grad, self.needs = rank_call, grad.contiguous(), needs
        self.query, self.out = rank_call.values(saved.tensors[0]), saved.tensors[3]
        assert saved.log_sum_exp is not None
        self._lse = saved.log_sum_exp
        self._tensors, self._records = saved.tensors[4 + TENSORS :], saved.facts
        self._query_grad = GradSum(rank_call, self.query)
        bias = rank_call.call.bias.tensor
        self._bias_grad = None
        if needs.bias and bias is not None:
            self._bias_grad = torch.zeros_like(bias, dtype=torch.float32)

    def run(self, step: KeyValues) -> tuple[GradSum, GradSum]:
        """The gradients of the keys and values of a step."""
        call = self.rank_call
        step = step._replace(key=call.values(step.key), value=call.values(step.value))
        key_grad, value_grad = GradSum(call, step.key), GradSum(call, step.value)
        records = [record for record in self._records if record.step == step.step]
        for part, record in zip(call.parts(step.chunks), records, strict=True):
            queries, keys = part.block.queries, part.block.keys
            saved = Saved(None, self._tensors[record.tensors], record.facts)
            grad, out, lse = (call.narrow(x, queries) for x in (self.grad, self.out, self._lse))
            tensors = (*_inputs(call, part, self.query, step), out)
            saved_part = SavedPart(record.backend, saved)
            found = part_backward(contiguous(grad), tensors, lse, part, saved_part, self.needs)
            self._query_grad.add_if_wanted(queries, found.query)
            key_grad.add_if_wanted(keys, found.key)
            value_grad.add_if_wanted(keys, found.value)
            if self._bias_grad is not None:
                add_bias_gradient(self._bias_grad, found.bias, part)
        return key_grad, value_grad

    def gradients(self, key: torch.Tensor, value: torch.Tensor) -> Gradients:
        """All gradients, after the last step; `key` and `value` are those of this rank."""
        call, needs = self.rank_call.call, self.needs
        sink = None
        if needs.sink and call.sink.offset is not None:
            size = call.shape.value_size
            sink = sink_gradient(call.sink.offset, self._lse, self.grad, self.out, size)
        bias = self._bias_grad
        if bias is not None and call.bias.tensor is not None:
            bias = bias.to(call.bias.tensor.dtype)
        return needs.pick(self._query_grad.result(), key, value, bias, sink)
