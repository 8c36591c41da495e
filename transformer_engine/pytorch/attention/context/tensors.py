"""Checks of the masks, biases and sequences of a context parallel call, before anything is sent.

Backends check the same tensors, but those of parts, while other ranks wait for what comes next.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends.dense import check_bias_shape
from transformer_engine.pytorch.attention.context.lengths import check_packed
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.call import Call, CallTensors
from transformer_engine.pytorch.attention.masks.alibi import check_slopes
from transformer_engine.pytorch.attention.masks.masks import check_arbitrary, padding_from_masks


def check_tensors_of_call(call: Call) -> None:
    """Check shapes, dtypes of masks, and the lengths of sequences.

    Raises:
        ValueError: shapes that do not fit this rank's queries and the keys of all ranks, and
            lengths that do not fit the tokens of all ranks.
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
    tokens = shape.queries * context.size, shape.keys * context.size
    if shape.qkv_format == "thd":
        formats.check_equal_batch(ends.shape[0] - 1, key_ends.shape[0] - 1)
        check_packed(queries, "cu_seqlens_q", context.size, tokens[0])
        check_packed(keys, "cu_seqlens_kv", context.size, tokens[1])
    else:
        formats.check_batch(batch, ends, key_ends)
        formats.check_lengths(tokens[0], ends, "cu_seqlens_q")
        formats.check_lengths(tokens[1], key_ends, "cu_seqlens_kv")


def values_of_lengths(call: Call) -> dict[str, list[int] | None]:
    """The values of all `cu_seqlens`, which must be equal on all ranks."""
    names = CallTensors._fields[:4]
    return {
        name: None if x is None else x.tolist()
        for name, x in zip(names, call.tensors[:4], strict=True)
    }
