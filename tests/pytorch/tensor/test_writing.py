"""Weights that are written together."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.writing import write


def test_an_error_leaves_whole_weights(device: str) -> None:
    """Those before it have codes and scales of their new values, those after it the old ones."""
    with te.fp8_model_init():
        weights = [te.Linear(32, 32, device=device).weight for _ in range(3)]
    before = weights[2].dequantize()
    values = 100 * torch.randn(32, 32, device=device)
    version = weights[0]._data._version
    with pytest.raises(ValueError, match="expected values of shape"):
        write(weights, [values, values[1:], values])
    assert weights[0]._data._version > version
    torch.testing.assert_close(weights[0].dequantize(), values, rtol=0.07, atol=1.0)
    assert torch.equal(weights[2].dequantize(), before)
