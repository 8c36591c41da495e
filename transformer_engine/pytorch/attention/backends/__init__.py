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
come from torch's default generator: who calls has put the tracker's states there.

`needs` says which gradients a backward will be asked for. Where it is none of them, no backward
follows and `forward` returns no `Saved`. Otherwise both functions run with gradients switched off.
`Saved` holds every tensor that `backward` reads, those of the call included, so that autograd keeps
them and refuses to go on when one has been changed in place. Of the call `backward` may read
settings, no tensors, and it gets a call without them. (The scales and amaxes of FP8 casts are state
of the module, read and raised when the casts run.)

`backward` takes the gradient of the result, of any strides, and returns gradients in the shapes and
dtypes of query, key, value, bias and sink; None where `needs` says so. Their memory is new, or that
of `grad` where shapes allow. Where query, key and value fill one tensor, as the parts of a
projection do, cuDNN and flash-attn write their gradients as the parts of one such tensor, and
`join_gradients` (`core/projections.py`) returns that tensor without a copy: the parts must arrive
there as they are. `backward` may be called again with the same `Saved`, and changes nothing in it.

Mind that the result may share memory with what is saved.
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
