"""`return_max_logit`: the largest score of each head, from its definition."""

import attention_reference as reference
import pytest
import torch
from cases.attention import cu_seqlens
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv

from transformer_engine.pytorch.attention import max_logit

QUERIES, KEYS, HEADS, SIZE = 5, 7, 4, 8
LENGTHS = ((3, 4), (5, 7))  # real queries and keys of each sequence


def expected(query, key, seen, bias=None):
    """Returns the largest score of each head; inputs are `[batch, sequence, heads, size]`."""
    query, key = (x.detach().double().cpu().transpose(1, 2) for x in (query, key))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) / SIZE**0.5
    if bias is not None:
        scores = scores + bias.double().cpu()
    return scores.masked_fill(~seen, float("-inf")).amax((0, 2, 3))


def inputs(device, groups=HEADS):
    torch.manual_seed(1)
    shapes = ((2, QUERIES, HEADS, SIZE), (2, KEYS, groups, SIZE), (2, KEYS, groups, SIZE))
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def check(found, wanted) -> None:
    assert found.dtype is torch.float32 and not found.requires_grad
    torch.testing.assert_close(found.cpu(), wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask_type", reference.MASK_TYPES)
@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize("few", [False, True])
def test_masks_and_windows(device, monkeypatch, mask_type, window, few) -> None:
    if few:  # memory for the scores of two queries
        monkeypatch.setattr(max_logit, "_BYTES", 2 * 4 * 2 * HEADS * KEYS)
    window = (2, 0) if window and "causal" in mask_type else window
    query, key, value = inputs(device, groups=2)
    module = make_module(
        num_gqa_groups=2,
        attn_mask_type=mask_type,
        window_size=window,
        qkv_format="bshd",
        return_max_logit=True,
    )
    arguments, hidden = {}, None
    if mask_type == "arbitrary":
        hidden = torch.rand(2, 1, QUERIES, KEYS) > 0.7
        arguments["attention_mask"] = hidden.to(device)
    elif "padding" in mask_type:
        ends = zip(("q", "kv"), zip(*LENGTHS, strict=True), strict=True)
        arguments = {f"cu_seqlens_{side}": cu_seqlens(sizes, device) for side, sizes in ends}
    out, found = module(query, key, value, **arguments)
    seen = reference.seen_keys(mask_type, window, QUERIES, KEYS, LENGTHS, hidden)
    check(found, expected(query, key, seen))
    module.return_max_logit = False
    assert torch.equal(out, module(query, key, value, **arguments))
    out.sum().backward()
    assert query.grad is not None


def test_packed_sequences(device) -> None:
    query, key, value = make_qkv(device, shape=(8, HEADS, SIZE))
    ends = cu_seqlens([3, 5], device)
    module = make_module(attn_mask_type="padding_causal", qkv_format="thd", return_max_logit=True)
    _, found = module(query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    each = [
        expected(q[None], k[None], torch.ones(n, n, dtype=torch.bool).tril())
        for q, k, n in zip(query.split((3, 5)), key.split((3, 5)), (3, 5), strict=True)
    ]
    check(found, torch.maximum(*each))


@pytest.mark.parametrize("rows", [1, QUERIES])
def test_biases_count(device, monkeypatch, rows) -> None:
    monkeypatch.setattr(max_logit, "_BYTES", 1)  # one query at a time
    query, key, value = inputs(device)
    bias = 3.0 * torch.randn(1, HEADS, rows, KEYS, device=device)
    module = make_module(attn_mask_type="no_mask", qkv_format="bshd", return_max_logit=True)
    biases = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    _, found = module(query, key, value, **biases)
    check(found, expected(query, key, torch.ones(QUERIES, KEYS, dtype=torch.bool), bias))


def test_heads_that_see_nothing(device) -> None:
    query, key, value = inputs(device)
    module = make_module(attn_mask_type="arbitrary", qkv_format="bshd", return_max_logit=True)
    hidden = torch.zeros(1, HEADS, 1, KEYS, dtype=torch.bool, device=device)
    hidden[:, 1] = True
    _, found = module(query, key, value, hidden)
    assert found.isinf().tolist() == [False, True, False, False]
