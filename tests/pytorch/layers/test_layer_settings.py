"""Settings of TransformerLayer that are set after construction change its blocks too."""

import pytest
import torch
from fused_layers import batch, build
from torch import nn

import transformer_engine.pytorch as te


def test_rate_of_dropped_paths():
    layer, x = build(), batch()
    whole = layer(x)
    layer.drop_path_rate = 1.0
    assert layer.drop_path.drop_prob == 1.0
    assert torch.equal(layer(x), x)
    for wrong, error in ((2.0, ValueError), ("0.1", TypeError)):
        with pytest.raises(error, match=r"\[TransformerLayer\] expected .*drop_path_rate.* layer"):
            layer.drop_path_rate = wrong
    layer.drop_path_rate = 0.0
    assert torch.equal(layer(x), whole)


def test_sequence_parallelism():
    options = {"tp_size": 2, "set_parallel_mode": True, "output_layernorm": True}
    layer = build(layer_type="decoder", **options)
    parts = [part for part in layer.modules() if hasattr(part, "sequence_parallel")]
    assert len(parts) == 9  # the layer, 3 and 4 parts of its attentions, and the MLP
    for on in (True, False):
        made = build(layer_type="decoder", sequence_parallel=on, **options)
        layer.sequence_parallel = on
        assert all(part.sequence_parallel is on for part in parts)
        for own, other in zip(layer.parameters(), made.parameters(), strict=True):
            marks = [getattr(one, "sequence_parallel", None) for one in (own, other)]
            assert marks[0] == marks[1]
    with pytest.raises(TypeError, match="expected sequence_parallel to be True or False"):
        layer.sequence_parallel = "yes"
    alone = build()
    alone.sequence_parallel = True
    assert not alone.layernorm_mlp.sequence_parallel  # there are no other ranks


class Attention(nn.Module):
    def forward(self, x, *_, **__):
        return x, x


def test_blocks_of_users_do_not_see_the_mask_type():
    layer, x = build(), batch()
    layer.self_attention = Attention()
    expected = layer(x)
    layer.self_attn_mask_type = "padding_causal"
    layer.self_attn_mask_type = "no_mask"
    assert layer.self_attn_mask_type == "no_mask"
    assert torch.equal(layer(x), expected)


def test_settings_leave_what_was_set_in_blocks():
    layer = build()
    layer.self_attention.core_attention.attn_mask_type = "no_mask"
    layer.drop_path_rate = 0.5
    assert layer.self_attention.core_attention.attn_mask_type == "no_mask"


class Plain(te.TransformerLayer):
    pass


class Own(te.TransformerLayer):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.layer_type = "sandwich"  # an attribute of its own


def test_subclasses_without_a_constructor_are_refused_what_ours_are():
    sizes = (32, 64, 4)
    with pytest.raises(ValueError, match="expected layer_type='encoder' to stay"):
        Plain(*sizes, device="cpu").layer_type = "decoder"
    assert Own(*sizes, device="cpu").layer_type == "sandwich"


def test_layers_inside_of_blocks_of_users_stay():
    layer = build()
    own = te.Linear(32, 32, parallel_mode="column", tp_size=2, device="cpu")
    layer.layernorm_mlp = nn.Sequential(own)
    layer.sequence_parallel = True
    assert not own.sequence_parallel
