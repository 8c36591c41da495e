"""What the functions that reorder the rows of a gated weight refuse."""

import pytest
import torch

import transformer_engine.pytorch as te


@pytest.mark.parametrize("reorder", [te.interleave_glu_tensor, te.deinterleave_glu_tensor])
def test_refusals(reorder):
    for size, error, message in (
        (2.0, TypeError, r"interleave_size to be an int, got 2\.0"),
        (0, ValueError, "interleave_size >= 1, got 0"),
        (3, ValueError, r"features divisible by interleave_size, got \(8,\)"),
    ):
        with pytest.raises(error, match=rf"^\[{reorder.__name__}\] expected .*{message}"):
            reorder(torch.ones(8), size)
    with pytest.raises(TypeError, match=r"expected tensor to be a torch.Tensor, got list"):
        reorder([1.0] * 8, 2)
