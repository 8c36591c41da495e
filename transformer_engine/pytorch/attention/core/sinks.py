"""`HasSink`: the scores of an attention module's sink, one for each head of this rank."""

from __future__ import annotations

import torch
from torch import nn

from transformer_engine.pytorch.attention.core.call import NO_SINK, Sink, check_softmax_type
from transformer_engine.pytorch.module.parallel_mode import value_for_each_head
from transformer_engine.pytorch.module.parameters import HasParameters, ParameterSet
from transformer_engine.pytorch.parallel.groups import TensorParallel


class HasSink(HasParameters, nn.Module):
    """Base of modules with a `softmax_type`; `softmax_offset` is there if it is `learnable`."""

    local_heads: int
    ranks: TensorParallel
    softmax_offset: nn.Parameter

    def _add_sink(self, softmax_type: str) -> None:
        self.softmax_type = check_softmax_type(softmax_type)
        self._parameter_set = ParameterSet(None)
        if softmax_type == "learnable":
            offset = value_for_each_head("softmax_offset", self.local_heads, self.ranks)
            self._parameter_set.create(self, [offset], torch.get_default_dtype(), None)

    def _sink(self, device: torch.device) -> Sink:
        if self.softmax_type == "vanilla":
            return NO_SINK
        if self.softmax_type == "learnable":
            return Sink("learnable", self.softmax_offset)
        zeros = torch.zeros(self.local_heads, dtype=torch.float32, device=device)
        return Sink(self.softmax_type, zeros)
