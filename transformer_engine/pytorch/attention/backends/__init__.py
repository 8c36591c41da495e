"""Attention backends, one file each.

A backend's `attend(query, key, value, call)` takes tensors in the call's own format (views with any
strides), and returns the result in that format with flat heads:

    sbhd  [sequence, batch, heads, size]  ->  [sequence, batch, heads * size of a value]
    bshd  [batch, sequence, heads, size]  ->  [batch, sequence, heads * size of a value]
    thd   [tokens, heads, size]           ->  [tokens, heads * size of a value]

key and value have `groups` heads, each of which serves `heads / groups` query heads. A query that
sees no key, or is padding, has a result of zero, and passes no gradient. Random numbers of dropout
come from torch's default generator: who calls has put the tracker's states there.
"""

from transformer_engine.pytorch.attention.backends import (
    cudnn,
    cudnn_fp8,
    flash2,
    flash3,
    flash4,
    sdpa,
    unfused,
)

BACKENDS = (
    flash4.BACKEND,
    cudnn.BACKEND,
    cudnn_fp8.BACKEND,
    flash3.BACKEND,
    sdpa.BACKEND,
    flash2.BACKEND,
    unfused.BACKEND,
)
