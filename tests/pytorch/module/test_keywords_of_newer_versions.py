"""Keywords that newer versions of the API have: their defaults work, other values are refused."""

import re

import pytest
import torch

import transformer_engine.pytorch as te

X = torch.ones(4, 2, 32)
Q = torch.ones(8, 2, 2, 16)
OF_ATTENTION = {
    "fp8_output": False,
    "bf16_backward": False,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
}


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


def test_defaults_of_attention_change_nothing():
    attention = te.DotProductAttention(2, 16)
    assert torch.equal(attention(Q, Q, Q, **OF_ATTENTION), attention(Q, Q, Q))


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_other_values_of_attention_are_refused(name):
    attention = te.DotProductAttention(2, 16, name="decoder.attention")
    value = {"score": 1} if OF_ATTENTION[name] is None else True
    text = re.escape(
        f"[DotProductAttention] expected {name}={OF_ATTENTION[name]}, the only value that is"
        f" implemented, got {value} (layer decoder.attention)"
    )
    with pytest.raises(NotImplementedError, match=f"^{text}$"):
        attention(Q, Q, Q, **{name: value})


def test_misspelt_keywords_of_attention():
    text = (
        r"DotProductAttention.forward\(\) got unexpected .* score_mode \(did you mean score_mod\?"
    )
    with pytest.raises(TypeError, match=text):
        te.DotProductAttention(2, 16)(Q, Q, Q, score_mode=None)


def test_layers_hand_on_keywords_of_attention():
    """Attention runs in one chain with its projections, which must not drop the keyword."""
    layer = te.MultiheadAttention(32, 2, attention_dropout=0.0, device="cpu")
    assert torch.equal(layer(X, fp8_output=False), layer(X))
    with pytest.raises(NotImplementedError, match="expected fp8_output=False"):
        layer(X, fp8_output=True)
