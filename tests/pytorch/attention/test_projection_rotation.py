"""Rotation of a projection gives the bits of rotating queries and keys apart, in less memory."""

import pytest
import torch
from precisions import scope
from rulers import assert_equal
from saved_memory import saved_storages

import transformer_engine.pytorch as te
from transformer_engine.pytorch import capture
from transformer_engine.pytorch.kernels.rope import rope

HEADS, SIZE, SEQUENCE, BATCH = 4, 16, 12, 2
SHAPES = {"sbhd": (SEQUENCE, BATCH), "bshd": (BATCH, SEQUENCE)}


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    """Makes layers run part by part, as with large inputs."""
    monkeypatch.setattr(capture, "HOST_BOUND_BYTES", 0)


def make(device, **arguments):
    return te.MultiheadAttention(
        HEADS * SIZE,
        HEADS,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
        device=device,
        **arguments,
    )


def step(module, x, angles, grad, recipe):
    """Returns the bytes that are saved for the backward, then results and gradients."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    with scope(recipe), saved_storages() as saved:
        y = module(leaf, rotary_pos_emb=angles)
    y.backward(grad)
    return sum(saved.values()), [y, leaf.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("qkv_format", SHAPES)
@pytest.mark.parametrize(
    "layout",
    [
        {"qkv_weight_interleaved": True},
        {"qkv_weight_interleaved": False},
        {"qkv_weight_interleaved": False, "num_gqa_groups": 2},
        {"qkv_weight_interleaved": True, "num_gqa_groups": 2},
        {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
        {"qk_norm_type": "RMSNorm"},
        {"rotary_pos_interleaved": True},
    ],
    ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()),
)
@pytest.mark.parametrize("recipe", ["high precision", "current"])
def test_equal_bits(recipe, layout, qkv_format, device):
    module = make(device, qkv_format=qkv_format, **layout)
    x = torch.randn(*SHAPES[qkv_format], HEADS * SIZE, device=device, dtype=torch.bfloat16)
    grad, angles = torch.randn_like(x), te.RotaryPositionEmbedding(SIZE)(SEQUENCE).to(device)
    found = step(module, x, angles, grad, recipe)[1]
    apart = step(module, x, (angles, angles), grad, recipe)[1]
    assert_equal(found, apart)


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_projection_is_not_kept(interleaved, device):
    module = make(device, qkv_weight_interleaved=interleaved)
    x = torch.randn(SEQUENCE, BATCH, HEADS * SIZE, device=device, dtype=torch.bfloat16)
    angles = te.RotaryPositionEmbedding(SIZE)(SEQUENCE).to(device)
    less = step(module, x, angles, torch.ones_like(x), "high precision")[0]
    more = step(module, x, (angles, angles), torch.ones_like(x), "high precision")[0]
    # Values are a view of the projection, whose queries and keys therefore stay in memory.
    assert more - less == 2 * x.nbytes


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("period", "rotated"), [(3, 2), (12, 8), (12, 0), (5, 5), (1, 1)])
def test_some_heads_are_copied(period, rotated, backward, device):
    x = torch.randn(SEQUENCE, BATCH, 12, SIZE, device=device)
    table = torch.randn(SEQUENCE, SIZE // 2, device=device)
    how = (table, None, None, False, False, backward)
    found, all_rotated = rope(x, *how, period, rotated), rope(x, *how)
    for head in range(12):
        expected = all_rotated if head % period < rotated else x
        assert torch.equal(found[:, :, head], expected[:, :, head])


@pytest.mark.parametrize(("period", "rotated"), [(0, 0), (13, 1), (3, 4), (3, -1)])
def test_periods_that_do_not_fit(period, rotated, device):
    x, table = torch.randn(4, 1, 12, 8, device=device), torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match="expected a period of 1 to 12 heads"):
        rope(x, table, None, None, False, False, False, period, rotated)
