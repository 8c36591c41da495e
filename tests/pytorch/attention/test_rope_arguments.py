"""What `apply_rotary_pos_emb` refuses and takes, whether a kernel computes it or torch."""

import pytest
import torch

from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

pytestmark = pytest.mark.parametrize("fused", [False, True])

ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def angles_on(device):
    return RotaryPositionEmbedding(8).to(device)(8)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("starts", [int32(1), int32(1, 2, 3), int32(1, 2)[:, None]], ids=str)
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_starts_of_another_number(fused, tensor_format, starts):
    """Both tensors have two sequences."""
    t = torch.randn(5, 1, 8) if tensor_format == "thd" else torch.randn(2, 2, 1, 8)
    with pytest.raises(ValueError, match=r"start_positions of shape \(2,\), one of each sequence"):
        apply_rotary_pos_emb(
            t, angles_on("cpu"), tensor_format, fused, ENDS, start_positions=starts
        )


@pytest.mark.parametrize("starts", [None, int32(0, 1)], ids=str)
@pytest.mark.parametrize("ends", [int32(0, 4, 2), int32(1, 2, 5), int32(0, 2, 6)], ids=str)
def test_ends_that_fall_or_go_beyond_the_tokens(fused, ends, starts):
    with pytest.raises(ValueError, match=r"cu_seqlens to rise from 0 to at most 5 \(the tokens\)"):
        apply_rotary_pos_emb(
            torch.randn(5, 1, 8), angles_on("cpu"), "thd", fused, ends, start_positions=starts
        )


def test_integers_are_not_rotated(fused):
    with pytest.raises(TypeError, match=r"expected t of floating point, got torch.int64"):
        apply_rotary_pos_emb(torch.ones(3, 2, 1, 8).long(), angles_on("cpu"), fused=fused)
