"""Stand-ins for flash-attn 2, 3 and 4 with their documented signatures, in plain torch.

For version 4 there is also the private `_flash_attn_bwd`, which writes gradients into tensors that
the caller passes.

Rows that belong to no sequence are NaN in results and gradients, as the kernels may leave them.
"""

import inspect
from itertools import pairwise
from types import SimpleNamespace

import torch


def _scores(q, k, **said):
    """Returns fp32 scores `[heads, queries, keys]` of one sequence, and the mask of hidden keys."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    causal, slopes = said["causal"], said.get("slopes")
    queries, keys = q.shape[0], k.shape[0]
    k = _for_each_query_head(k, q)
    centre = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    left, right = (-1 if side is None else side for side in said["window"])
    right = 0 if causal else right
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (key < centre - left)
    if right >= 0:
        hidden = hidden | (key > centre + right)
    scores = _heads_first(q) @ k.mT * said["scale"]
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * (centre - key).abs()
    return scores.masked_fill(hidden, -1e30), hidden


def _heads_first(x):
    return x.float().transpose(0, 1)


def _for_each_query_head(x, q):
    return _heads_first(x).repeat_interleave(q.shape[1] // x.shape[1], dim=0)


def _attend(q, k, v, **said):
    """Attention of one sequence, `[tokens, heads, size]`.

    The diagonal is aligned at the bottom right; -1 in the window means no limit.
    """
    scores, hidden = _scores(q, k, **said)
    sink, dropout = said.get("sink"), said.get("dropout", 0.0)
    if sink is not None:
        column = sink.float().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : k.shape[0]].masked_fill(hidden, 0.0)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ _for_each_query_head(v, q)).transpose(0, 1).to(q.dtype)


def _gradients(q, k, v, out, dout, lse, **said):
    """Returns the gradients of one sequence, from the output and log-sum-exps of the forward."""
    scores, hidden = _scores(q, k, **said)
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)
    upstream = _heads_first(dout)
    of_weights = upstream @ _for_each_query_head(v, q).mT
    of_scores = weights * (of_weights - (upstream * _heads_first(out)).sum(-1, keepdim=True))
    dq = of_scores @ _for_each_query_head(k, q) * said["scale"]
    dk = of_scores.mT @ _heads_first(q) * said["scale"]
    dv = weights.mT @ upstream
    dk, dv = (x.unflatten(0, (k.shape[1], -1)).sum(1) for x in (dk, dv))
    return [x.transpose(0, 1) for x in (dq, dk, dv)]


class _Tail(torch.autograd.Function):
    """Returns its input. The gradient is NaN in rows that belong to no sequence."""

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
    query_ends, key_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max(b - a for a, b in pairwise(query_ends)) <= longest[0]
    assert max(b - a for a, b in pairwise(key_ends)) <= longest[1]
    q = _Tail.apply(q, query_ends[-1])
    k, v = _Tail.apply(k, key_ends[-1]), _Tail.apply(v, key_ends[-1])
    parts = [
        _attend(q[a:b], k[c:d], v[c:d], **options)
        for (a, b), (c, d) in zip(pairwise(query_ends), pairwise(key_ends), strict=True)
    ]
    tail = v.new_full((q.shape[0] - query_ends[-1], q.shape[1], v.shape[-1]), float("nan"))
    return torch.cat((*parts, tail))


# Documented keywords of flash_attn_func beside q, k and v; and the additional keywords of
# flash_attn_varlen_func.
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


# Keywords of `_flash_attn_bwd`, beside q, k, v, out, dout and lse.
BACKWARD_KEYWORDS = (
    "softmax_scale causal softcap window_size_left window_size_right deterministic dq dk dv"
)


def _flash_attn_bwd(q, k, v, out, dout, lse, **keywords):
    assert set(keywords) <= set(BACKWARD_KEYWORDS.split())
    window = keywords["window_size_left"], keywords["window_size_right"]
    assert -1 not in window, "None is no limit"
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype is torch.float32
    said = {
        "scale": keywords["softmax_scale"],
        "causal": keywords["causal"],
        "window": window,
    }
    for i, rows in enumerate(zip(q, k, v, out, dout, lse, strict=True)):
        for name, gradient in zip(("dq", "dk", "dv"), _gradients(*rows, **said), strict=True):
            keywords[name][i] = gradient


_flash_attn_bwd.__signature__ = inspect.Signature(
    [
        *[
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("q", "k", "v", "out", "dout", "lse")
        ],
        *[
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
            for name in BACKWARD_KEYWORDS.split()
        ],
    ]
)


SIDES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def module(version):
    """Returns the functions of a version; 3 and 4 return statistics beside the result."""
    known = set(KEYWORDS[version].split())
    of_varlen = known | set(VARLEN_KEYWORDS[version].split())
    alone, newest = version == "flash2", version == "flash4"

    def flash_attn_func(q, k, v, *, return_lse=False, **keywords):
        assert set(keywords) <= known
        said = _options(keywords)
        out = torch.stack([_attend(*rows, **said) for rows in zip(q, k, v, strict=True)])
        if not return_lse:
            return out if alone else (out, None)
        assert newest
        pairs = zip(q, k, strict=True)
        return out, torch.stack([_scores(*pair, **said)[0].logsumexp(-1) for pair in pairs])

    def flash_attn_varlen_func(q, k, v, **keywords):
        assert set(keywords) <= of_varlen
        sides = [keywords[name] for name in SIDES]
        out = _packed(q, k, v, *sides[:2], sides[2:], _options(keywords))
        return out if alone else (out, None)

    def _options(keywords):
        window = keywords["window_size"]
        assert not newest or -1 not in window, "None is no limit"
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
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        interface=SimpleNamespace(**({"_flash_attn_bwd": _flash_attn_bwd} if newest else {})),
    )
