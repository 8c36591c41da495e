"""cuDNN's fused attention in FP8, through cuDNN graphs that this library builds.

`unfused_fp8.py` defines what FP8 attention computes. cuDNN rounds some values at other places. Its
forward casts `exp(score - largest score so far)`, and divides by the sum of these afterwards. Its
backward casts the weights that it recomputes from the statistics of the forward, and computes
`sum(d out * out)` from rounded values.

The backward may run in FP8, or in high precision: then it is cuDNN's 16-bit backward, with the
values that the forward multiplied.

Under context parallelism query, key and value of a part arrive as codes. The result of a part is a
mean of values, so it is cast with the scale of the values: the scale of the merged result could be
too large for the result of a part. The backward of parts is the one in 16 bit.

The log-sum-exp is `[batch, heads, queries]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch._torch_private import constant_in_graphs
from transformer_engine.pytorch.attention.backends.backend import (
    ASKABLE,
    FEW_ELEMENTS,
    FUSED,
    GPU,
    NO_BIAS,
    NO_CACHE,
    NO_DROPOUT,
    NO_SINK,
    SOMETHING,
    Backend,
    Gradients,
    Needs,
    Parts,
    Problem,
    Requirement,
    Saved,
)
from transformer_engine.pytorch.attention.backends.cudnn import (
    log_sum_exp_of_part,
    settings_for,
    statistics_of_part,
)
from transformer_engine.pytorch.attention.backends.cudnn_support import (
    NOT_ASKED,
    gpu_of,
    question,
    taken_by_cudnn,
)
from transformer_engine.pytorch.attention.core.call import Call, CallShape
from transformer_engine.pytorch.attention.core.environment import environment, repeatable
from transformer_engine.pytorch.capture import is_capturing, memoize
from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.kernels.attention import (
    APART,
    AS_INPUTS,
    NO_SEQUENCES,
    OWN_GRAPH,
    attention_backward,
    attention_refusal,
)
from transformer_engine.pytorch.kernels.attention_fp8 import (
    fp8_attention_backward,
    fp8_attention_forward,
    fp8_attention_refusal,
)
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.memory import contiguous
from transformer_engine.pytorch.kernels.packed import map_parts


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
) -> tuple[torch.Tensor, Saved | None]:
    """See `backends/__init__.py`."""
    casts, dtype = call.casts, query.dtype
    assert casts is not None
    training = any(needs)
    deterministic = training and repeatable(environment())
    settings = settings_for(call.shape, False, False, deterministic, OWN_GRAPH)
    if call.part:
        dtype, in_fp8, out_slot = casts.dtype, False, casts.qkv._replace(amax=None)
        query, key, value = (x.contiguous() for x in (query, key, value))
    else:
        in_fp8 = casts.grad_out is not None and _backward_in_fp8(call.shape, casts.backward_in_fp8)
        out_slot = casts.out
        query, key, value = map_parts(lambda x: casts.qkv.codes(x)[0], (query, key, value))
    scales, amaxes = (casts.qkv.scale, None, out_slot.scale), (casts.softmax.amax, out_slot.amax)
    codes, statistics, pairs = fp8_attention_forward(
        query, key, value, scales, settings, call.scale, training, amaxes
    )
    out = dequantize(codes, E4M3, pairs[2], dtype)
    if not training:
        return out, None
    return out, Saved(statistics, (query, key, value, codes, pairs), (settings, in_fp8))


def backward(grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
    """See `backends/__init__.py`."""
    casts = call.casts
    assert casts is not None
    settings, in_fp8 = saved.facts
    if in_fp8:
        return _gradients_in_fp8(grad, saved, settings, call, needs)
    tensors = saved.tensors if call.part else _sixteen_bit_values(grad, saved)
    return _gradients_in_16_bit(grad, tensors, saved, call, needs)


def _gradients_in_fp8(
    grad: torch.Tensor, saved: Saved, settings: tuple[int, ...], call: Call, needs: Needs
) -> Gradients:
    query, key, value, out, pairs = saved.tensors
    assert call.casts is not None and saved.log_sum_exp is not None
    out_slot, product_slot, inputs_slot = call.casts.backward
    format = out_slot.format
    assert format is not None
    *codes, pair = fp8_attention_backward(
        out_slot.codes(grad)[0],
        query,
        key,
        value,
        out,
        saved.log_sum_exp,
        pairs,
        (out_slot.scale, product_slot.scale, inputs_slot.scale),
        settings,
        call.scale,
        format,
        (product_slot.amax, *[inputs_slot.amax if needed else None for needed in needs[:3]]),
        _place_of_gradients(),
    )
    return needs.pick(*map_parts(lambda x: dequantize(x, format, pair, grad.dtype), tuple(codes)))


def _place_of_gradients() -> int:
    """Where gradients lie: in compiled code apart, as operators cannot return parts of a tensor."""
    return APART if torch.compiler.is_compiling() else AS_INPUTS


def _sixteen_bit_values(grad: torch.Tensor, saved: Saved) -> tuple[torch.Tensor, ...]:
    query, key, value, out, pairs = saved.tensors
    dtype = sixteen_bit(grad.dtype)
    inputs = map_parts(lambda x: dequantize(x, E4M3, pairs[0], dtype), (query, key, value))
    return *inputs, dequantize(out, E4M3, pairs[2], dtype)


def _gradients_in_16_bit(
    grad: torch.Tensor, tensors: tuple[torch.Tensor, ...], saved: Saved, call: Call, needs: Needs
) -> Gradients:
    query, key, value, out = tensors
    settings, _ = saved.facts
    assert saved.log_sum_exp is not None
    own = (grad.contiguous().to(query.dtype), query, key, value, out, saved.log_sum_exp)
    no_extras, place = (None, None, None, False, False), _place_of_gradients()
    results = attention_backward(*own, settings, call.scale, 0.0, NO_SEQUENCES, *no_extras, place)
    found = needs.pick(*results[:3])
    return Gradients(*[x if x is None else x.to(grad.dtype) for x in found])


def sixteen_bit(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a 16-bit backward for tensors of this dtype."""
    return torch.bfloat16 if dtype is torch.float32 else dtype


def _backward_in_fp8(problem: Problem | CallShape, asked: bool | None) -> bool:
    """Whether the backward is in FP8, too: if asked for, or by default if it is the faster one."""
    if asked is not None:
        return asked
    return not problem.rule.type.causal and _has_backward(problem)


def _has_backward(problem: Problem | CallShape) -> bool:
    """Whether cuDNN's backward in FP8 is known to be right for these sizes.

    cuDNN accepts all lengths, but 9.19 computes wrong gradients for the queries after the last
    multiple of 16 (seen for 77, 88, 200 and 1000 queries). The limit here is 128 for safety: up to
    9.15, cudnn-frontend has a workaround in the 16-bit backward for keys that are no multiple of
    128, and none for FP8.
    """
    sizes, lengths = (problem.key_size, problem.value_size), (problem.queries, problem.keys)
    return sizes == (128, 128) and all((length or 0) % 128 == 0 for length in lengths)


def _trains_in_fp8(problem: Problem, allowed: AttentionVariables) -> bool:
    return problem.training and not problem.part and _backward_in_fp8(problem, allowed.fp8_backward)


@memoize
def _refusal(problem: Problem, in_fp8: bool) -> str:
    """Why cuDNN refuses a problem; `""` if it takes it. `question` fills in unknown sizes."""
    if is_capturing():
        return NOT_ASKED
    sizes, how = question(problem)
    device = gpu_of(problem)
    format = E5M2 if problem.training and in_fp8 else None
    reason = fp8_attention_refusal(sizes, device, how, problem.training, format)
    if reason or not problem.training or in_fp8:
        return reason
    plain = (0.0, False, (), False, False, True)
    return attention_refusal(sizes, sixteen_bit(problem.dtype), device, how, *plain)


def _ordinary(problem: Problem) -> bool:
    alike = problem.alike or not problem.rule.type.causal
    sizes_fit = problem.key_size == problem.value_size <= 128
    return not problem.windowed and alike and sizes_fit and problem.queries != 1


@constant_in_graphs
def _is_here() -> bool:
    return not _refusal(Problem(device="cuda", key_size=128, value_size=128), True)


def _fits(problem: Problem, allowed: AttentionVariables) -> bool:
    if _trains_in_fp8(problem, allowed):
        return _has_backward(problem)
    sizes = (problem.key_size, problem.value_size)
    return max(sizes) <= 256 and all(size % 16 == 0 for size in sizes)


def _notice(problem: Problem, allowed: AttentionVariables) -> str:
    if not problem.training or allowed.fp8_backward is not None:
        return ""
    if _trains_in_fp8(problem, allowed):
        return ""
    return (
        "[attention] FP8 attention runs on the backend 'cudnn_fp8' with a backward in 16 bit, of"
        " the values that the forward multiplied: it is faster for causal masks, and the one in FP8"
        " does not take all sizes; NVTE_FP8_DPA_BWD=1 asks for FP8, 0 for 16 bit"
    )


def _strip(saved: Saved, call: Call) -> Saved:
    return Saved(None, (), saved.facts)


def _restore(
    stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, call: Call
) -> Saved:
    query, key, value, out = tensors
    tensors = (query, key, value, contiguous(out))
    return Saved(statistics_of_part(lse, call), tensors, stripped.facts)


def _recordable(call: Call) -> bool:
    """Whether the call has the scales of the module's state, and is no part."""
    casts = call.casts
    return casts is not None and casts.of_state and not call.part


def _persistent(call: Call) -> Sequence[torch.Tensor]:
    assert call.casts is not None
    return call.casts.tensors()


BACKEND = Backend(
    "cudnn_fp8",
    forward,
    backward,
    keeps_scores=False,
    recordable=_recordable,
    records_on=("cuda",),
    persistent=_persistent,
    requirements=(
        FUSED,
        Requirement(
            lambda problem, allowed: problem.fp8,
            "computes in FP8 alone; use a recipe with fp8_dpa",
        ),
        Requirement(
            lambda problem, allowed: not problem.calibrating,
            "records no amaxes without casts; calibrate on 'unfused'",
        ),
        GPU,
        ASKABLE,
        Requirement(
            lambda problem, allowed: (problem.capability or (9, 0)) >= (9, 0),
            "needs a GPU of compute capability 9.0",
        ),
        SOMETHING,
        FEW_ELEMENTS,
        Requirement(
            lambda problem, allowed: not (problem.rule.type.padding or problem.rule.type.arbitrary),
            "takes whole sequences; use attn_mask_type 'no_mask' or 'causal'",
        ),
        Requirement(
            _fits,
            "takes heads whose sizes are divisible by 16, up to 256; with NVTE_FP8_DPA_BWD=1 heads"
            " of 128 and lengths divisible by 128",
        ),
        NO_BIAS,
        NO_SINK,
        NO_DROPOUT,
        NO_CACHE,
        Requirement(
            lambda problem, allowed: not (problem.part and allowed.fp8_backward),
            "has no backward in FP8 for parts of the keys; leave NVTE_FP8_DPA_BWD, or use"
            " cp_comm_type='a2a'",
        ),
        taken_by_cudnn(
            lambda problem, allowed: _refusal(problem, _trains_in_fp8(problem, allowed)),
            lambda problem: _ordinary(problem) and _is_here(),
            "takes several queries, heads up to 128 and no window inside torch.compile, and is for"
            " builds with cuDNN",
        ),
    ),
    notice=_notice,
    parts=Parts(log_sum_exp_of_part, _strip, _restore, takes_codes=True),
)
