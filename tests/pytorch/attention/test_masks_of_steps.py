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
    """What `function(begin, end, params)` gives for the parts of a sequence."""
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
    """Wherever they end without a cache: there are as many queries as keys then."""
    tensors = torch.randn(3, TOKENS, 1, HEADS, SIZE, device=device)
    how = {"window_size": window, "bottom_right_diagonal": bottom_right}
    mask_of_steps = mask
    if form == "named":
        mask_of_steps = "padding_causal" if mask == "causal" else "padding"
    module = te.DotProductAttention(HEADS, SIZE, attn_mask_type=mask_of_steps, **how).eval()
    whole = module(*tensors, attn_mask_type=mask)
    if (mask, window) == ("no_mask", None):  # earlier queries see later keys: there are none yet
        whole = module(*tensors, attn_mask_type="causal")[-1:]
    found = in_steps(
        lambda begin, end, params: module(*tensors[:, begin:end], inference_params=params),
        form,
        device,
    )
    torch.testing.assert_close(found[-len(whole) :], whole, rtol=1e-4, atol=1e-5)
