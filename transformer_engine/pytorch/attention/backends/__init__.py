"""Attention backends, one file each. A backend is a pair of functions, without autograd inside.

    forward(query, key, value, call, needs) -> result, Saved or None
    backward(grad, saved, call, needs) -> Gradients

`forward` takes tensors in the call's own format (views with any strides), and returns the result in
that format with flat heads:

    sbhd  [sequence, batch, heads, size]  ->  [sequence, batch, heads * size of a value]
    bshd  [batch, sequence, heads, size]  ->  [batch, sequence, heads * size of a value]
    thd   [tokens, heads, size]           ->  [tokens, heads * size of a value]

key and value have `groups` heads, each of which serves `heads / groups` query heads. A query that
sees no key, or is padding, has a result of zero, and passes no gradient. Random numbers of dropout
come from torch's default generator, where the caller has put the tracker's states, or from a seed
that the caller has drawn (`draw_seed`).

`needs` says which gradients a backward will be asked for. Where there are none, no backward
follows, and `forward` returns no `Saved`. Otherwise both functions run with gradients switched off.
`Saved` holds every tensor that `backward` reads, those of the call included: who calls gives all of
them to `save_for_backward` as they are, so that autograd finds out when one has been changed in
place. The result may share memory with them. Of the call `backward` reads settings, no tensors; it
gets `call.settings()`. Scales and amaxes of FP8 casts are state of the module: the casts of the
backward read and raise them.

`backward` takes the gradient of the result, of any strides, and returns gradients in the shapes and
dtypes of query, key, value, bias and sink, None where `needs` does not ask for one. It may be
called again with the same `Saved`. Where query, key and value of whole sequences fill one tensor,
as the parts of a projection do, cuDNN and flash-attn write their gradients as the parts of one such
tensor. `join_gradients` (`core/projections.py`) returns that tensor without a copy if it gets these
very parts; so does cuDNN with thd.
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
