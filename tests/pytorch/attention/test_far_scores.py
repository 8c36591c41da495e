"""Gradients that cuDNN has computed wrong: scores far below zero, single queries and keys."""

import math

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.backends import cudnn
from transformer_engine.pytorch.attention.backends.backend import Problem

HEADS, SIZE, BATCH = 2, 64, 2
SIZES = [(64, 64), (100, 192), (2, 64), (200, 64), (1, 64), (1, 128), (1, 100), (64, 1), (1, 1)]
KINDS = [
    "no_mask",
    "causal",
    "causal_bottom_right",
    "window",
    "bias",
    "arbitrary",
    "padding",
    "thd",
]


def inputs(queries, keys, scores, device):
    """Returns query, key and value; unless `scores` is 0, all scores are near it."""
    torch.manual_seed(0)
    made = [torch.randn(BATCH, n, HEADS, SIZE, device=device) for n in (queries, keys, keys)]
    for x, first in zip(made, (1.0, scores * math.sqrt(SIZE)), strict=False):
        if scores:
            x.mul_(0.1)[..., 0] = first
    return [x.bfloat16().requires_grad_() for x in made]


def ends(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def arguments(kind, queries, keys, device):
    """Returns the arguments of the module and those of its call."""
    if kind == "window":
        return {"attn_mask_type": "no_mask"}, {"window_size": (100, 100)}
    if kind == "bias":
        bias = torch.zeros(1, HEADS, queries, keys, device=device, dtype=torch.bfloat16)
        how = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
        return {"attn_mask_type": "no_mask"}, how
    if kind == "arbitrary":
        mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=device)
        return {"attn_mask_type": kind}, {"attention_mask": mask}
    if kind in ("padding", "thd"):
        lengths = {"cu_seqlens_q": ends([queries] * BATCH, device)}
        lengths["cu_seqlens_kv"] = ends([keys] * BATCH, device)
        return {"attn_mask_type": "padding"}, lengths
    return {"attn_mask_type": kind}, {}


def hidden(kind, queries, keys, device):
    i = torch.arange(queries, device=device)[:, None]
    j = torch.arange(keys, device=device)
    shift = keys - queries
    if kind == "window":
        return (j - i - shift).abs() > 100
    return j > i + (shift if "bottom" in kind else 0) if "causal" in kind else (j < 0) & (i < 0)


def gradients(kind, leaves, upstream):
    queries, keys = leaves[0].shape[1], leaves[1].shape[1]
    settings, how = arguments(kind, queries, keys, leaves[0].device)
    qkv_format = "thd" if kind == "thd" else "bshd"
    module = te.DotProductAttention(
        HEADS,
        SIZE,
        qkv_format=qkv_format,
        attention_dropout=0.0,
        attention_type="cross",
        **settings,
    )
    values = [x.flatten(0, 1) for x in leaves] if kind == "thd" else leaves
    out = module(*values, **how)
    return torch.autograd.grad(out, leaves, upstream.to(out.dtype).view(out.shape))


@pytest.mark.parametrize("fused", ["1", "0"])
@pytest.mark.parametrize("scores", [0.0, -120.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_gradients(queries, keys, kind, scores, fused, device, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
    leaves = inputs(queries, keys, scores, device)
    upstream = torch.randn(BATCH, queries, HEADS * SIZE, device=device).bfloat16()
    found = gradients(kind, leaves, upstream)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    query, key, value = (x.transpose(1, 2) for x in exact)
    weights = (query @ key.transpose(-1, -2) / math.sqrt(SIZE)).masked_fill(
        hidden(kind, queries, keys, device), -math.inf
    )
    out = (weights.softmax(-1).nan_to_num() @ value).transpose(1, 2).flatten(2)
    expected = torch.autograd.grad(out, exact, upstream.double())
    assert all([torch.isfinite(one).all() for one in found])
    # Large terms cancel in the gradients of queries and keys, so only those of values are compared.
    pairs = list(zip(found, expected, strict=True))[2 if scores else 0 :]
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("size", [64, 96, 192])
def test_gradients_of_sinks_of_packed_sequences(size, device):
    """CuDNN before 9.26 computes wrong ones unless heads of values have 64, 128 or 256 elements."""
    torch.manual_seed(0)
    lengths = [40, 7, 100]
    inputs = [torch.randn(sum(lengths), HEADS, size, device=device).bfloat16() for _ in range(3)]
    module = te.DotProductAttention(
        HEADS, size, qkv_format="thd", softmax_type="learnable", attn_mask_type="padding"
    ).to(device)
    torch.nn.init.normal_(module.softmax_offset)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = module(*leaves, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends(lengths, device)))
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, [*leaves, module.softmax_offset], upstream)
    exact = [x.detach().double().requires_grad_() for x in (*inputs, module.softmax_offset)]
    *values, offset = exact
    results = []
    for query, key, value in zip(*(x.split(lengths) for x in values), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        sink = offset.view(HEADS, 1, 1).expand(HEADS, len(query), 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        results.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
    expected = torch.autograd.grad(torch.cat(results), exact, upstream.double())
    for one, other in zip(found, expected, strict=True):
        bound = 0.02 * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0.03, atol=bound)


def test_cudnn_leaves_single_queries_to_others():
    """It runs them without a backward, and in thd, whose graphs have room for 64 queries."""
    reason = "has wrong gradients of a single query"
    (requirement,) = [one for one in cudnn.BACKEND.requirements if one.reason == reason]
    problem, allowed = Problem(device="cuda", queries=1, keys=64), AttentionVariables()
    assert not requirement.holds(problem, allowed)
    for changed in ({"training": False}, {"qkv_format": "thd"}, {"queries": 2}):
        assert requirement.holds(problem._replace(**changed), allowed)


@pytest.mark.parametrize("keys", [64, 192])
def test_gradients_of_torch_func(keys, device):
    """`torch.func` differentiates torch's own kernels: the forward decides which backward runs."""
    module = te.DotProductAttention(HEADS, SIZE, attn_mask_type="arbitrary", qkv_format="bshd")
    tensors = inputs(128, keys, -100.0, device)
    _, how = arguments("arbitrary", 128, keys, device)
    how["attention_mask"][..., 5, 3] = True

    def loss(*tensors):
        return module(*tensors, **how).float().pow(2).sum()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*[x.detach() for x in tensors])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
