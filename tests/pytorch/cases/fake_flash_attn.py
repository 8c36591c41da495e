"""Stand-ins for flash-attn 2, 3 and 4 with their documented signatures, in plain torch.

Rows of no sequence are NaN in results and gradients, as they may be in those of the kernels.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch


def _attend(q, k, v, **said):
    """One sequence: `[tokens, heads, size]`; the diagonal ends bottom-right, -1 is no limit."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    scale, causal, window = said["scale"], said["causal"], said["window"]
    slopes, sink, dropout = said.get("slopes"), said.get("sink"), said.get("dropout", 0.0)
    queries, keys, dtype = q.shape[0], k.shape[0], q.dtype
    per_group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(per_group, dim=0) for x in (k, v))
    centre = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    left, right = (-1 if side is None else side for side in window)
    right = 0 if causal else right
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (key < centre - left)
    if right >= 0:
        hidden = hidden | (key > centre + right)
    scores = q @ k.mT * scale
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * (centre - key).abs()
    scores = scores.masked_fill(hidden, -1e30)
    if sink is not None:
        column = sink.float().view(-1, 1, 1).expand(-1, queries, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :keys].masked_fill(hidden, 0.0)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ v).transpose(0, 1).to(dtype)


class _Tail(torch.autograd.Function):
    """The tensor; the gradient of rows that belong to no sequence is NaN."""

    @staticmethod
    def forward(ctx, x, used):
        ctx.used = used
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[ctx.used :] = float("nan")
        return grad, None


def _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, options):
    assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32
    of_query, of_key = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max(b - a for a, b in pairwise(of_query)) <= longest[0]
    assert max(b - a for a, b in pairwise(of_key)) <= longest[1]
    q = _Tail.apply(q, of_query[-1])
    k, v = _Tail.apply(k, of_key[-1]), _Tail.apply(v, of_key[-1])
    parts = [
        _attend(q[a:b], k[c:d], v[c:d], **options)
        for (a, b), (c, d) in zip(pairwise(of_query), pairwise(of_key), strict=True)
    ]
    tail = v.new_full((q.shape[0] - of_query[-1], q.shape[1], v.shape[-1]), float("nan"))
    return torch.cat((*parts, tail))


def _dense(q, k, v, options):
    return torch.stack([_attend(*rows, **options) for rows in zip(q, k, v, strict=True)])


# Documented keywords of flash_attn_func beside q, k and v; and those of flash_attn_varlen_func.
KEYWORDS = {
    "flash2": "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    " return_attn_probs",
    "flash3": "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk"
    " softcap num_splits pack_gqa deterministic sm_margin",
    "flash4": "qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap"
    " num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod aux_tensors",
}
VARLEN_KEYWORDS = {
    "flash2": "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k block_table",
    "flash3": "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k",
    "flash4": "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k"
    " page_table",
}


SIDES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def module(version):
    """The functions of a version; 3 and 4 return statistics beside the result."""
    known = set(KEYWORDS[version].split())
    of_varlen = known | set(VARLEN_KEYWORDS[version].split())
    alone = version == "flash2"

    def flash_attn_func(q, k, v, **keywords):
        assert set(keywords) <= known
        out = torch.stack(
            [_attend(*rows, **_options(keywords)) for rows in zip(q, k, v, strict=True)]
        )
        return out if alone else (out, None)

    def flash_attn_varlen_func(q, k, v, **keywords):
        assert set(keywords) <= of_varlen
        sides = [keywords[name] for name in SIDES]
        out = _packed(q, k, v, *sides[:2], sides[2:], _options(keywords))
        return out if alone else (out, None)

    def _options(keywords):
        window = keywords["window_size"]
        assert version != "flash4" or -1 not in window, "None is no limit"
        renamed = {
            "window_size": "window",
            "softmax_scale": "scale",
            "alibi_slopes": "slopes",
            "learnable_sink": "sink",
            "dropout_p": "dropout",
            "causal": "causal",
        }
        return {renamed[name]: said for name, said in keywords.items() if name in renamed}

    return SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )
