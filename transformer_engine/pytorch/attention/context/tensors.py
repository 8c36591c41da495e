"""Checks of the masks, biases and sequences of a context parallel call, before anything is sent.

Backends check the same tensors, but those of parts, while other ranks wait for what comes next.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends.dense import check_bias_shape
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.masks.alibi import check_slopes
from transformer_engine.pytorch.attention.masks.masks import check_arbitrary, padding_from_masks


def check_tensors_of_call(call: Call) -> None:
    """Check shapes, and dtypes of masks; the values of `cu_seqlens` are checked by `lengths_of`.

    Raises:
        ValueError: shapes that do not fit this rank's queries and the keys of all ranks.
        TypeError: masks that are not bool, `cu_seqlens` that are not int32.
    """
    shape, mask, bias, context = call.shape, call.attention_mask, call.bias, call.context
    assert context is not None
    kind, batch = shape.rule.type, shape.batch or 0
    sizes = (batch, shape.heads, shape.queries, shape.keys * context.size)
    if kind.arbitrary:
        check_arbitrary(mask, sizes)
    if bias.tensor is not None:
        check_bias_shape(bias.tensor, sizes)
    if bias.slopes is not None:
        check_slopes(bias.slopes, batch, shape.heads)
    if not kind.padding:
        return
    queries, keys = call.query_sequences, call.key_sequences
    if queries.cu_seqlens is None or keys.cu_seqlens is None:
        if isinstance(mask, torch.Tensor | tuple | list) and shape.qkv_format != "thd":
            padding_from_masks(mask, batch, shape.queries, shape.keys)
        return
    ends, key_ends = queries.checked("cu_seqlens_q")[0], keys.checked("cu_seqlens_kv")[0]
    if shape.qkv_format == "thd":
        formats.check_equal_batch(ends.shape[0] - 1, key_ends.shape[0] - 1)
    else:
        formats.check_batch(batch, ends, key_ends)
