"""Unequal numbers of queries and keys, no queries or keys, and tokens outside of sequences."""

import pytest
import torch
from cases.attention import BACKENDS, cu_seqlens
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv

from transformer_engine.pytorch.attention.core import formats

PACKED = {"qkv_format": "thd", "attn_mask_type": "padding_causal_bottom_right"}


def inputs(queries, keys, device):
    """Returns query, key and value in thd."""
    query, *_ = make_qkv(device, shape=(queries, 4, 8))
    return query, *make_qkv(device, shape=(keys, 4, 8))[1:]


@pytest.fixture(params=list(BACKENDS))
def backend(request, monkeypatch):
    for name, value in BACKENDS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.mark.parametrize(("queries", "keys"), [(5, 8), (8, 5)])
@pytest.mark.parametrize("window", [None, (1, 0)], ids=str)
def test_one_tensor_of_ends_with_other_numbers_of_tokens(device, backend, queries, keys, window):
    """Queries or keys after the last sequence belong to no sequence."""
    ends, tensors = cu_seqlens([2, 3], device), inputs(queries, keys, device)
    attention, results = make_module(**PACKED, window_size=window), []
    for other in (ends, ends.clone()):
        out = attention(*tensors, cu_seqlens_q=ends, cu_seqlens_kv=other)
        grads = torch.autograd.grad(out.square().sum(), tensors)
        results.append((out, *grads))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert not results[0][0][5:].any()


def test_one_tensor_of_ends_beyond_the_keys():
    ends = cu_seqlens([2, 3], "cpu")
    with pytest.raises(ValueError, match=r"cu_seqlens_kv to rise from 0 to at most 4 \(the tok"):
        make_module(**PACKED)(*inputs(5, 4, "cpu"), cu_seqlens_q=ends, cu_seqlens_kv=ends)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize(
    ("mask", "arguments"),
    [
        ("padding", {}),
        ("padding", {"window_size": (1, 1)}),
        ("padding_causal_bottom_right", {}),
        ("padding_causal", {"core_attention_bias_type": "alibi"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_a_side_without_tokens(device, qkv_format, mask, arguments, queries, keys):
    """Results of queries without keys are zero, and so are all gradients."""
    tensors = inputs(queries, keys, device)
    if qkv_format == "bshd":
        tensors = [x.detach()[None].requires_grad_() for x in tensors]
    ends = [cu_seqlens([length], device) for length in (queries, keys)]
    attention = make_module(qkv_format=qkv_format, attn_mask_type=mask)
    out = attention(*tensors, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], **arguments)
    assert out.shape == (*tensors[0].shape[:-2], 32)
    for x, grad in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()
    assert not out.any()


@pytest.mark.parametrize("sides", [(), ("q",), ("q", "kv")], ids=str)
@pytest.mark.parametrize("longest", [None, 4])
def test_tokens_of_no_sequence(device, sides, longest):
    ends, tensors = cu_seqlens([], device), inputs(4, 3, device)
    padded = {f"cu_seqlens_{side}_padded": ends for side in sides}
    out = make_module(**PACKED)(
        *tensors,
        **{"cu_seqlens_q": ends, "cu_seqlens_kv": ends.clone(), **padded},
        **{"max_seqlen_q": longest, "max_seqlen_kv": longest},
    )
    assert out.shape == (4, 32)
    for x in (out, *torch.autograd.grad(out.sum(), tensors)):
        assert not x.any()


def test_kernels_get_no_batch_without_sequences(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    ends = cu_seqlens([], "cpu")
    with pytest.raises(ValueError, match=r"sdpa +refuses: needs at least one query and one key"):
        make_module(**PACKED)(*inputs(4, 3, "cpu"), cu_seqlens_q=ends, cu_seqlens_kv=ends)


def test_sequences_that_are_moved_may_be_none(device):
    maps = formats.gap_maps(3, *[cu_seqlens([], device)] * 2)
    assert maps.absent.all()
    assert maps.back_absent.all()
    assert not formats.gather_rows(torch.ones(3, 2, device=device), *maps[:2]).any()
