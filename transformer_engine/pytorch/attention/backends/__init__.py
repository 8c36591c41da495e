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

`needs` says which gradients a backward will be asked for. If it asks for none, no backward follows,
and `forward` returns no `Saved`. Otherwise both functions run with gradients switched off.

`Saved` holds every tensor that `backward` reads, including tensors of the call. The caller gives
all of them to `save_for_backward` as they are, so that autograd notices if a program changes one of
them in place. The result may share memory with them. `backward` gets `call.settings()`, which has
no tensors. Scales and amaxes of FP8 casts are state of the module: the casts of the backward read
and raise them.

`backward` takes the gradient of the result, of any strides. It returns gradients in the shapes and
dtypes of query, key, value, bias and sink, or None for those that `needs` does not ask for. It may
be called again with the same `Saved`. If query, key and value are the parts of one tensor, as those
of a fused projection are, cuDNN and flash-attn write their gradients as the parts of a new tensor
of that layout (flash-attn only for whole sequences, cuDNN also for thd). `join_gradients`
(`core/projections.py`) then returns that tensor without a copy.
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
