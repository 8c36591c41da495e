"""Chains whose stages read any strides are recorded with inputs that are not contiguous."""

import pytest
import torch
from recordings import all_recorded, segments_of
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.rope import embedding
from transformer_engine.pytorch.chain import segments

HEADS, SIZE = 3, 16


def parts(device, order):
    """Query, key and value `[sequence, batch, heads, size]`, parts of one tensor."""
    shape, axis = {"apart": ((3, HEADS, SIZE), 2), "by head": ((HEADS, 3, SIZE), 3)}[order]
    whole = torch.randn(8, 2, *shape, dtype=torch.bfloat16, device=device)
    found = [part.detach().requires_grad_() for part in whole.unbind(axis)]
    assert not any(part.is_contiguous() for part in found)
    return found


def results(function, inputs):
    """The result of three calls, and the gradients of the inputs."""
    found = []
    for _ in range(3):
        out = function(*inputs)
        found += [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]
    return found


def compare(function, inputs, monkeypatch):
    """Check that a function has the same bits as without recordings."""
    recorded = results(function, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_segments_of", lambda *_: [])
        by_stages = results(function, inputs)
    for got, expected in zip(recorded, by_stages, strict=True):
        assert_bitwise(got, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(device, interleaved, monkeypatch):
    chain = embedding._RopeOfOne(embedding._ROPE.chain)
    monkeypatch.setattr(embedding, "_ROPE", chain)
    freqs = te.RotaryPositionEmbedding(SIZE)(8).to(device)

    def rotate(t):
        return embedding.apply_rotary_pos_emb(t, freqs, fused=True, interleaved=interleaved)

    for order in ("apart", "by head"):
        compare(rotate, parts(device, order)[:1], monkeypatch)
        assert all_recorded(chain)
    assert len(segments_of(chain)) == 2  # one for each set of strides


def test_elements_that_are_not_adjacent_run_by_stages(device, monkeypatch):
    chain = embedding._RopeOfOne(embedding._ROPE.chain)
    monkeypatch.setattr(embedding, "_ROPE", chain)
    freqs = te.RotaryPositionEmbedding(SIZE)(8).to(device)
    t = torch.randn(8, 2, SIZE, HEADS, device=device).transpose(2, 3)
    for _ in range(2):
        found = embedding.apply_rotary_pos_emb(t, freqs, fused=True)
        assert_bitwise(found, embedding.apply_rotary_pos_emb(t.contiguous(), freqs, fused=True))
    assert [bool(one.refused) for one in segments_of(chain)] == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["apart", "by head"])
def test_attention(order, monkeypatch):
    module = te.DotProductAttention(HEADS, SIZE)
    inputs = parts("cuda", order)
    compare(module, inputs, monkeypatch)
    assert all_recorded(module._core)
    plain = [part.detach().clone().requires_grad_() for part in inputs]
    for got, expected in zip(results(module, inputs), results(module, plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert all_recorded(module._core) and len(segments_of(module._core)) == 2
