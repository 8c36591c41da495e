"""Keywords that newer versions of the API have: their defaults work, other values are refused."""

import re

import pytest
import torch

import transformer_engine.pytorch as te

X = torch.ones(4, 2, 32)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
@pytest.mark.parametrize("name", ["fp8_output", "fp8_grad"])
def test_results_and_gradients_are_in_high_precision(kind, name, enabled):
    layer = kind(32, 48, device="cpu", name="decoder.fc")
    text = re.escape(
        f"[{kind.__name__}] expected {name}=False, the only value that is implemented, got True"
        " (layer decoder.fc)"
    )
    with te.fp8_autocast(enabled=enabled):
        assert torch.equal(layer(X, None, False, False), layer(X, **{name: False}))
        with pytest.raises(NotImplementedError, match=f"^{text}$"):
            layer(X, **{name: True})
