"""Sequence lengths in decoder layers: self-attention and cross-attention have different keys."""

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te

TOKENS, ENCODED = torch.tensor([6, 3]), torch.tensor([4, 2])
PADDING = {"self_attn_mask_type": "padding_causal", "enc_dec_attn_mask_type": "padding"}


def make(device: str, **options: object) -> te.TransformerLayer:
    torch.manual_seed(0)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    options |= {**PADDING, **dropout, "layer_type": "decoder", "device": device}
    return te.TransformerLayer(32, 64, 2, **options)


def ends(lengths: torch.Tensor, device: str) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)


def is_padding(lengths: torch.Tensor, longest: int, device: str) -> torch.Tensor:
    return (torch.arange(longest) >= lengths[:, None])[:, None, None].to(device)


def by_masks(layer: te.TransformerLayer, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
    device = x.device.type
    own, other = is_padding(TOKENS, 6, device), is_padding(ENCODED, 4, device)
    return layer(x, own, encoder_output=encoded, enc_dec_attn_mask=(own, other))


@pytest.fixture
def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 6, 32, device=device), torch.randn(2, 4, 32, device=device)


@pytest.mark.parametrize("keys", [TOKENS, ENCODED], ids=["of the decoder", "of the encoder"])
def test_a_mask_of_cross_attention_is_in_place_of_lengths(
    batch: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, device: str
) -> None:
    x, encoded = batch
    layer = make(device, attn_input_format="bshd")
    masks = (is_padding(TOKENS, 6, device), is_padding(ENCODED, 4, device))
    lengths = {"cu_seqlens_q": ends(TOKENS, device), "cu_seqlens_kv": ends(keys, device)}
    out = layer(x, encoder_output=encoded, enc_dec_attn_mask=masks, **lengths)
    expected = by_masks(layer, x, encoded)
    for tokens, one, other in zip(TOKENS.tolist(), out, expected, strict=True):
        assert_bitwise(one[:tokens], other[:tokens])


@pytest.mark.parametrize("packed", [False, True], ids=["bshd", "thd"])
def test_lengths_of_keys_are_those_of_the_encoder_output(
    batch: tuple[torch.Tensor, torch.Tensor], packed: bool, device: str
) -> None:
    x, encoded = batch
    expected = by_masks(make(device, attn_input_format="bshd"), x, encoded)
    layer = make(device, attn_input_format="thd" if packed else "bshd")
    if packed:
        x = torch.cat([row[:n] for row, n in zip(x, TOKENS.tolist(), strict=True)])
        encoded = torch.cat([row[:n] for row, n in zip(encoded, ENCODED.tolist(), strict=True)])
    out = layer(
        x,
        encoder_output=encoded,
        cu_seqlens_q=ends(TOKENS, device),
        cu_seqlens_kv=ends(ENCODED, device),
    )
    rows = out.split(TOKENS.tolist()) if packed else out
    for tokens, one, other in zip(TOKENS.tolist(), rows, expected, strict=True):
        torch.testing.assert_close(one[:tokens], other[:tokens])


@torch.no_grad()
def test_lengths_of_keys_alone_are_not_for_self_attention(device: str) -> None:
    """The sequences of the encoder output have padding, those of the decoder have none."""
    torch.manual_seed(1)
    layer = make(device, attn_input_format="thd")
    x, encoded = torch.randn(9, 32, device=device), torch.randn(9, 32, device=device)
    lengths = {"cu_seqlens_q": ends(TOKENS, device), "cu_seqlens_kv": ends(ENCODED, device)}
    room = torch.tensor([0, 5, 9], dtype=torch.int32, device=device)
    padded = {**lengths, "cu_seqlens_kv_padded": room, "max_seqlen_kv": 4}
    out = layer(x, encoder_output=encoded, **padded)
    real = torch.cat([encoded[:4], encoded[5:7]])
    torch.testing.assert_close(out, layer(x, encoder_output=real, **lengths))
