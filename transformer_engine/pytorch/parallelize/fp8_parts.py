"""Parts of weights that are kept in FP8 alone."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.parallel.shards import Shard
from transformer_engine.pytorch.scale_layout import layout_of
from transformer_engine.pytorch.tensor.attributes import InitialValue
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.weight_quantizer import WeightQuantizer
from transformer_engine.pytorch.tensor.writing import ShardRanks


def fp8_part(weight: QuantizedTensor, shard: Shard, rank: int) -> QuantizedTensor:
    """The part of a rank, with the values that it has in the whole.

    The parts keep one scale, that of the whole: who writes them reduces their largest magnitude.
    Blocks of 128 are those of the part. All ranks call it.
    """
    quantizer = WeightQuantizer.writing(weight).over(
        ShardRanks(layer=(shard.ranks.check(),), groups=())
    )
    values = shard.of(weight.decoded(torch.float32), rank).contiguous()
    scales = None if layout_of(weight._format).in_blocks else weight.scales
    matrix = quantizer.restored(values, scales, weight.dtype)
    return quantizer.holding(matrix.codes, matrix.scales, weight.dtype)


def share_initial_value(weight: Any, part: Any, shard: Shard, rank: int) -> None:
    """Let a part have its part of what the weight was initialised with, where that is kept."""
    initial = getattr(weight, "initial_value", None)
    if initial is not None and initial.get() is not None:
        InitialValue(shard.of(initial.get(), rank).clone()).attach(part)
