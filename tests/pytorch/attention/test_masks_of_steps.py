"""Masks and windows of steps with a cache are those of one call over all tokens."""

from collections import OrderedDict

import pytest
import torch

import transformer_engine.pytorch as te

TOKENS, HEADS, SIZE = 6, 2, 4
FORMS = ["plain", "on the device", "named"]
PARTS = ((0, 2), (2, 3), (3, 4), (4, 6))


def cache_of(form, device="cpu"):
    named = (HEADS, SIZE, torch.float32) if form == "named" else ()
    params = te.InferenceParams(1, TOKENS, *named)
    if form == "on the device":
        params.sequence_len_offset = torch.tensor(0, device=device)
    return params


def in_steps(function, form, device="cpu"):
    """Joins the results of `function(begin, end, params)` for the parts of a sequence."""
    params, parts = cache_of(form, device), []
    for begin, end in PARTS:
        if form == "named":
            params.pre_step(OrderedDict(a=end - begin))
        parts.append(function(begin, end, params))
        if form != "named":
            params.sequence_len_offset += end - begin
    return torch.cat(parts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mask", "window"),
    [("no_mask", (2, 0)), ("no_mask", None), ("causal", (2, 0)), ("causal", None)],
    ids=str,
)
@pytest.mark.parametrize("bottom_right", [None, True, False])
@torch.no_grad()
def test_diagonals_end_at_the_last_key(device, form, mask, window, bottom_right):
    """`bottom_right_diagonal` has no effect: one call over all tokens has a square mask."""
    tensors = torch.randn(3, TOKENS, 1, HEADS, SIZE, device=device)
    how = {"window_size": window, "bottom_right_diagonal": bottom_right}
    mask_of_steps = mask
    if form == "named":
        mask_of_steps = "padding_causal" if mask == "causal" else "padding"
    module = te.DotProductAttention(HEADS, SIZE, attn_mask_type=mask_of_steps, **how).eval()
    whole = module(*tensors, attn_mask_type=mask)
    if (mask, window) == ("no_mask", None):  # in steps only the last query sees all keys
        whole = module(*tensors, attn_mask_type="causal")[-1:]
    found = in_steps(
        lambda begin, end, params: module(*tensors[:, begin:end], inference_params=params),
        form,
        device,
    )
    torch.testing.assert_close(found[-len(whole) :], whole, rtol=1e-4, atol=1e-5)


def cross_attention(**how):
    options = {"attention_type": "cross", "attention_dropout": 0.0, "attn_mask_type": "no_mask"}
    return te.MultiheadAttention(8, HEADS, **{**options, **how}, device="cpu").eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("late", [False, True], ids=["of the layer", "of the call"])
@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ("causal", None),
        ("padding_causal_bottom_right", None),
        ("no_mask", (1, 1)),
        ("padding", (0, 3)),
    ],
    ids=str,
)
@torch.no_grad()
def test_cross_attention_of_steps_refuses_diagonals(form, mask, window, late):
    """It does not know the positions of the queries."""
    how = {"attn_mask_type": mask, "window_size": window}
    layer = cross_attention(**({} if late else how))
    params = cache_of(form)
    if form == "named":
        params.pre_step({"a": 2})
    message = r"expected the mask type no_mask, padding or arbitrary, and no window, in cross"
    for _ in range(3):
        with pytest.raises(ValueError, match=message):
            layer(
                torch.randn(2, 1, 8),
                encoder_output=torch.randn(4, 1, 8),
                inference_params=params,
                **(how if late else {}),
            )
    decoder = te.TransformerLayer(
        *(8, 8, HEADS),
        layer_type="decoder",
        self_attn_mask_type="padding_causal" if form == "named" else "causal",
        enc_dec_attn_mask_type=mask,
        enc_dec_window_size=window,
        device="cpu",
    )
    with pytest.raises(ValueError, match=message):
        decoder.eval()(
            torch.randn(2, 1, 8), encoder_output=torch.randn(4, 1, 8), inference_params=params
        )


@torch.no_grad()
def test_cross_attention_of_steps_takes_masks():
    """The mask has the rows of the step's queries; (-1, -1) is no window."""
    layer, x, encoded = cross_attention(), torch.randn(TOKENS, 1, 8), torch.randn(4, 1, 8)
    hidden = torch.ones(TOKENS, 4).triu(1).bool()
    whole = layer(x, attn_mask_type="causal", encoder_output=encoded)
    found = in_steps(
        lambda begin, end, params: layer(
            x[begin:end],
            hidden[begin:end],
            encoder_output=encoded,
            inference_params=params,
            attn_mask_type="arbitrary",
            window_size=(-1, -1),
        ),
        "plain",
    )
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
