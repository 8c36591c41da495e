"""Tokens sorted by expert, with padding, against loops that define the results."""

from collections.abc import Callable, Iterator

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.pytorch.moe.padding import moe_permute_and_pad_with_probs
from transformer_engine.pytorch.moe.permutation import moe_permute_with_probs, moe_unpermute

TOKENS, HIDDEN = 9, 6


def problem(
    device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens with no, two and three experts; experts with 4, 8, 0 and 5 tokens."""
    torch.manual_seed(0)
    mask = torch.zeros(TOKENS, 4, dtype=torch.bool, device=device)
    mask[1:5, 0] = mask[1:9, 1] = mask[4:9, 3] = True
    x = torch.randn(TOKENS, HIDDEN, device=device).to(dtype).requires_grad_()
    return x, mask, torch.rand(TOKENS, 4, device=device).requires_grad_()


def padded(
    x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, align: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return rows, weights and sizes, sorted by expert."""

    def each() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for e in range(mask.shape[1]):
            rows, weights = x[mask[:, e]], probs[mask[:, e], e]
            missing = -len(rows) % align
            yield (
                torch.cat([rows, rows.new_zeros(missing, HIDDEN)]),
                torch.cat([weights, weights.new_zeros(missing)]),
            )

    rows, weights = zip(*each(), strict=True)
    return torch.cat(rows), torch.cat(weights), [len(one) for one in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("align", [1, 2, 4, 16])
def test_rows_weights_and_sizes(align: int, dtype: torch.dtype, device: str) -> None:
    x, mask, probs = problem(device, dtype)
    counts = mask.sum(0)
    rows, weights, _, offsets, sizes = te.moe_permute_and_pad_with_probs(
        x, probs, mask, counts, align
    )
    expected, expected_weights, expected_sizes = padded(x, probs, mask, align)
    assert_bitwise(rows, expected)
    assert_bitwise(weights, expected_weights)
    assert sizes.tolist() == expected_sizes and sizes.dtype is counts.dtype
    assert (offsets is None) == (expected_sizes == counts.tolist())
    upstream = torch.randn_like(rows), torch.randn_like(weights)
    found = torch.autograd.grad((rows, weights), (x, probs), upstream)
    again = torch.autograd.grad((expected, expected_weights), (x, probs), upstream)
    bound = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, **bound)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, list])
def test_nothing_to_pad_is_the_plain_permutation(
    kind: torch.dtype | type[list], device: str
) -> None:
    x, mask, probs = problem(device)
    mask = mask[:, :2]
    counts = mask.sum(0)
    numbers = counts.tolist() if kind is list else counts.to(kind)  # type: ignore[arg-type]
    rows, weights, row_id_map, offsets, sizes = moe_permute_and_pad_with_probs(
        x, probs[:, :2], mask, numbers, 4
    )
    plain = moe_permute_with_probs(x, probs[:, :2], mask, int(counts.sum()))
    for one, other in zip((rows, weights, row_id_map), plain, strict=True):
        assert_bitwise(one, other)
    assert offsets is None and sizes.tolist() == [4, 8]


@pytest.fixture
def _sums_in_order() -> Iterator[None]:
    """Without this, the order in which a GPU adds the rows of a token may differ between runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_sums_in_order")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("align", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_back_again_is_as_without_padding(
    dtype: torch.dtype, align: int, weighted: bool, device: str
) -> None:
    """Rows of padding are not read, even if they are NaN; their gradients are zero."""
    x, mask, probs = problem(device, dtype)
    merging = probs if weighted else None
    rows, _, row_id_map, offsets, sizes = moe_permute_and_pad_with_probs(
        x, probs, mask, mask.sum(0), align
    )
    factors = torch.arange(2.0, 6.0, device=device).repeat_interleave(sizes)
    is_padding = (rows == 0).all(1)
    layer = (rows * factors[:, None].to(dtype)).masked_fill(is_padding[:, None], torch.nan)
    layer.retain_grad()
    merged = moe_unpermute(layer, row_id_map, merging, x.shape, pad_offsets=offsets)

    plain, _, plain_map = moe_permute_with_probs(x, probs, mask, int(mask.sum()))
    plain_factors = torch.arange(2.0, 6.0, device=device).repeat_interleave(mask.sum(0))
    expected = moe_unpermute(plain * plain_factors[:, None].to(dtype), plain_map, merging, x.shape)
    assert_bitwise(merged, expected)
    upstream = torch.randn_like(merged)
    leaves = (x, probs) if weighted else (x,)
    found = torch.autograd.grad(merged, (*leaves, layer), upstream)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=False):
        assert_bitwise(one, other)
    assert not found[-1][is_padding].any() and found[-1][~is_padding].any()


def test_no_tokens(device: str) -> None:
    x, probs = torch.ones(0, 4, device=device), torch.ones(0, 2, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    rows, weights, row_id_map, offsets, sizes = moe_permute_and_pad_with_probs(
        x, probs, probs > 0, counts, 16
    )
    assert rows.shape == (0, 4) and weights.shape == (0,) and sizes.tolist() == [0, 0]
    assert moe_unpermute(rows, row_id_map, pad_offsets=offsets).shape == (0, 4)


def refused(**changes: object) -> Callable[[], object]:
    x, mask, probs = problem("cpu")
    arguments = {"inp": x, "probs": probs, "routing_map": mask}
    arguments |= {"tokens_per_expert": mask.sum(0), "align_size": 16, **changes}
    return lambda: moe_permute_and_pad_with_probs(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        (refused(tokens_per_expert=None), ValueError, "expected tokens_per_expert, got None"),
        (refused(routing_map=[[1]]), TypeError, "routing_map to be a torch.Tensor, got list"),
        (refused(probs=None), TypeError, "probs to be a torch.Tensor, got NoneType"),
        (refused(align_size=0), ValueError, "expected align_size >= 1, got 0"),
        (refused(align_size=1.5), TypeError, "expected align_size to be an int"),
        (refused(tokens_per_expert=torch.ones(3)), ValueError, r"of shape \(4,\).*got \(3,\)"),
        (
            refused(tokens_per_expert=[4.0, 8.0, 0.0, 5.0]),
            TypeError,
            "integers of 32 or 64 bits, got torch.float32",
        ),
        (refused(tokens_per_expert=[4, 8, 0, 4]), ValueError, r"=\[4, 8, 0, 5\]"),
        (refused(tokens_per_expert="4805"), TypeError, "tokens_per_expert to be integers, got '4"),
        (
            refused(tokens_per_expert=torch.tensor([4, 8, 0, 5], dtype=torch.uint8)),
            TypeError,
            "integers of 32 or 64 bits, got torch.uint8",
        ),
    ],
)
def test_refusals(run: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"\[moe_permute_and_pad_with_probs\] .*" + text):
        run()


def test_offsets_that_do_not_fit() -> None:
    x, mask, probs = problem("cpu")
    rows, _, row_id_map, offsets, _ = moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 4)
    assert offsets is not None
    with pytest.raises(ValueError, match=r"expected pad_offsets of shape \(4,\)"):
        moe_unpermute(rows, row_id_map, probs, x.shape, pad_offsets=offsets[:2])
    with pytest.raises(ValueError, match="expected inp with padding, more than 17 rows"):
        moe_unpermute(rows[:17], row_id_map, probs, x.shape, pad_offsets=offsets)
    with pytest.raises(ValueError, match=r"pad_offsets of 4 or more experts, .* got 2"):
        moe_unpermute(rows, row_id_map, None, x.shape, pad_offsets=offsets[:2])
    with pytest.raises(ValueError, match=r"that lead to the 20 rows of inp, got \[0, 0, 0, 8\]"):
        moe_unpermute(rows, row_id_map, None, x.shape, pad_offsets=torch.tensor([0, 0, 0, 8]))
