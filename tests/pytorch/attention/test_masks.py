"""Masks: every type, window and alignment against the definition, query by query."""

import attention_reference as reference
import numpy as np
import pytest
import torch

from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.masks.masks import (
    MASK_TYPES,
    Mask,
    Padding,
    as_window,
    build_mask,
    check_arbitrary,
    mask_rule,
    mask_type,
    padding_from_lengths,
    padding_from_masks,
)

SIZES = [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)]
WINDOWS = [None, (1, 0), (2, 0), (0, 0)]
TWO_SIDED = [None, (1, 1), (2, 0), (0, 3), (-1, 1), (1, -1), (100, 100)]


def _seen(mask: Mask, queries: int, keys: int, batch: int) -> torch.Tensor:
    hidden = mask.dense(queries, keys, torch.device("cpu"))
    if hidden is None:
        hidden = torch.zeros((), dtype=torch.bool)
    return ~hidden.expand(batch, 1, queries, keys)


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("name", [name for name in MASK_TYPES if name != "arbitrary"])
def test_against_definition(name, queries, keys):
    lengths = [(queries, keys), (max(1, queries - 2), max(1, keys - 1)), (0, 0)]
    query_lengths, key_lengths = (torch.tensor(side) for side in zip(*lengths, strict=True))
    windows = WINDOWS if mask_type(name).causal else TWO_SIDED
    for window in windows:
        padding = None
        if mask_type(name).padding:
            padding = padding_from_lengths(query_lengths, key_lengths, queries, keys)
        mask = build_mask(mask_rule(name, window), queries, keys, padding)
        expected = reference.seen_keys(name, window, queries, keys, lengths)
        assert torch.equal(_seen(mask, queries, keys, 3), expected), window
        if mask.hidden is None:
            assert mask.may_blind(queries, keys) == bool((~expected.any(-1)).any())


@pytest.mark.parametrize("window", TWO_SIDED)
def test_arbitrary_with_window(window):
    arbitrary = torch.rand(2, 1, 4, 6) < 0.4
    mask = build_mask(mask_rule("arbitrary", window), 4, 6, arbitrary=arbitrary)
    expected = reference.seen_keys("arbitrary", window, 4, 6, [(4, 6)] * 2, arbitrary)
    assert torch.equal(_seen(mask, 4, 6, 2), expected)


def test_self_attention_padding_needs_no_dense_band():
    lengths = torch.tensor([3, 5])
    padding = padding_from_lengths(lengths, lengths, 5, 5)
    mask = build_mask(mask_rule("padding_causal_bottom_right", (2, 0)), 5, 5, padding)
    assert (mask.left, mask.right, mask.diagonal) == (2, 0, 0)
    assert torch.equal(mask.hidden, padding.hidden())


def test_full_and_causal_are_recognised():
    assert build_mask(mask_rule("no_mask"), 4, 4).full
    assert build_mask(mask_rule("causal"), 4, 4).causal
    assert build_mask(mask_rule("causal_bottom_right"), 4, 4).causal
    assert build_mask(mask_rule("causal", (3, 0)), 4, 4).causal
    assert build_mask(mask_rule("causal_bottom_right"), 1, 9).full
    assert build_mask(mask_rule("no_mask", (9, 9)), 4, 4).full
    assert not build_mask(mask_rule("causal_bottom_right"), 2, 4).causal
    assert not build_mask(mask_rule("causal", (2, 0)), 4, 4).causal


def test_alignment_of_windows_can_be_chosen():
    assert mask_rule("no_mask", (1, 1)).bottom_right
    assert not mask_rule("no_mask", (1, 1), False).bottom_right
    assert not mask_rule("causal", (1, 0), True).bottom_right
    assert mask_rule("causal_bottom_right", None, False).bottom_right


@pytest.mark.parametrize("name", ["padding,causal", "causal,padding", "causal, padding"])
def test_combined_names(name):
    assert mask_type(name) == MASK_TYPES["padding_causal"]


def test_windows_that_mean_something_else_are_announced():
    with pytest.warns(UserWarning, match=r"window_size \(4, 4\).*'causal'.*\(4, 0\)"):
        assert mask_rule("causal", (4, 4))[1:3] == (4, 0)
    with pytest.warns(UserWarning, match=r"\(-1, 0\).*'padding'.*no window"):
        assert mask_rule("padding", (-1, 0))[1:3] == (-1, -1)
    assert mask_rule("causal", (4, 4))[1:3] == (4, 0)  # warns only once
    assert mask_rule("causal", (-1, -1))[1:3] == (-1, 0)


@pytest.mark.parametrize("window", [(1,), (1, 2, 3), (-2, 0), (), (0, -3)])
def test_bad_windows(window):
    with pytest.raises(ValueError, match=r"\[attention\] expected window_size .* got \("):
        mask_rule("no_mask", window)


@pytest.mark.parametrize("window", [(True, 1), (1, False), (2.0, 1.0), "11", 4, [1, None]], ids=str)
def test_windows_of_other_types_are_refused(window):
    """Also after an equal window: `1 == True == 1.0`, and results are cached by window."""
    inputs = [torch.randn(5, 1, 2, 4)] * 3
    modules = [DotProductAttention(2, 4, attn_mask_type="no_mask") for _ in range(2)]
    for module in modules:
        with pytest.raises(TypeError, match=r"window_size \(left, right\) of integers, got"):
            module(*inputs, window_size=window)
        with pytest.raises(TypeError, match=r"window_size \(left, right\) of integers, got"):
            DotProductAttention(2, 4, window_size=window)
        for valid in ((1, 1), (2, 1), (1, 0)):
            module(*inputs, window_size=valid)


def test_windows_of_other_integers():
    numbers = np.array([2, 1])
    assert as_window([*numbers]) == as_window([2, 1]) == (2, 1)
    assert {type(side) for side in as_window([*numbers])} == {int}


def test_unknown_type():
    with pytest.raises(ValueError, match=r"expected self_attn_mask_type in \{no_.*'diagonal'"):
        mask_rule("diagonal", parameter="self_attn_mask_type")


def test_padding_masks_are_checked():
    good = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    assert padding_from_masks(good, 2, 4, 4).shift() is None
    pair = padding_from_masks((good, torch.ones(2, 1, 1, 6, dtype=torch.bool)), 2, 4, 6)
    assert pair.shift().flatten().tolist() == [-4, -4]
    with pytest.raises(ValueError, match=r"key padding mask .* \(2, 1, 1, 6\), got \(2, 1, 1, 4\)"):
        padding_from_masks(good, 2, 4, 6)
    with pytest.raises(TypeError, match=r"attention_mask of dtype torch.bool .* torch.float32"):
        padding_from_masks(good.float(), 2, 4, 4)
    with pytest.raises(ValueError, match="one or two attention masks, got 3"):
        padding_from_masks((good, good, good), 2, 4, 4)
    with pytest.raises(TypeError, match=r"attention_mask to be a torch\.Tensor, got str"):
        padding_from_masks("padding", 2, 4, 4)


def test_padding_need_not_be_at_the_end():
    queries = torch.tensor([[True, False, False]]).view(1, 1, 1, 3)
    keys = torch.tensor([[False, True]]).view(1, 1, 1, 2)
    hidden = Padding(queries, keys).hidden()
    assert hidden[0, 0].tolist() == [[True, True], [False, True], [False, True]]


@pytest.mark.parametrize(
    ("keys", "shift"), [("..xx", 0), ("xx..", 2), ("x.x.", 2), ("....", 2), (".x.x", 1)]
)
def test_the_last_real_tokens_meet(keys, shift):
    """The diagonal ends at the last real tokens, wherever padding is; there are two queries."""
    queries = torch.zeros(1, 1, 1, 2, dtype=torch.bool)
    hidden = torch.tensor([token == "x" for token in keys]).view(1, 1, 1, 4)
    assert Padding(queries, hidden).shift().item() == shift


@pytest.mark.parametrize("shape", [(4, 6), (1, 1, 4, 6), (2, 3, 4, 6), (6,), (2, 1, 4, 1)])
def test_arbitrary_shapes(shape):
    check_arbitrary(torch.zeros(shape, dtype=torch.bool), (2, 3, 4, 6))


def test_arbitrary_shape_that_does_not_broadcast():
    with pytest.raises(ValueError, match=r"broadcasts to \(2, 3, 4, 6\).*got \(2, 4, 6\)"):
        check_arbitrary(torch.zeros(2, 4, 6, dtype=torch.bool), (2, 3, 4, 6))
