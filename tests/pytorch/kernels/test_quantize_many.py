"""`quantize_many` gives the same results for each tensor as `quantize`, on both backends."""

import fp8_reference as fp8
import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.quantize import quantize, quantize_many

# More tensors than one launch takes, parts of tiles, odd widths, empty tensors, a single tensor.
SHAPES = {
    "even": [(256, 384), (8, 16), (130, 264), (300, 8)] * 13,
    "odd": [(33, 65), (1, 7), (129, 40)],
    "empty": [(0, 8), (16, 16), (8, 0)],
    "one": [(1100, 136)],
}


def made(tensors, rowwise, columnwise, scales, amaxes, format, pairs):
    """The row-wise and column-wise codes of one call."""
    codes = [torch.empty_like(x, dtype=torch.uint8) for x in tensors] if rowwise else []
    transposed = []
    if columnwise:
        transposed = [x.new_empty(x.shape[::-1], dtype=torch.uint8) for x in tensors]
    quantize_many(tensors, codes, transposed, pairs, scales, amaxes, format)
    return codes, transposed


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", fp8.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_each_as_alone(device, shapes, dtype, sides, delayed, format):
    tensors = [torch.randn(shape).to(device, dtype) for shape in SHAPES[shapes]]
    count = len(tensors)
    values = torch.rand(count, device=device) + 0.5
    pairs = [torch.stack([1 / value, value]) for value in values]
    scales = list(values.split(1)) if delayed else []
    amaxes = [torch.full((1,), 0.5, device=device) for _ in tensors] if delayed else []
    expected_amaxes = [x.clone() for x in amaxes] or [None] * count
    own_pairs = [torch.zeros_like(pair) if delayed else pair.clone() for pair in pairs]
    found = made(tensors, *sides, scales, amaxes, format, own_pairs)
    for i, x in enumerate(tensors):
        how = (values[i : i + 1], expected_amaxes[i], None) if delayed else (None, None, pairs[i])
        *expected, _, _ = quantize(x, format, *how, *sides, None)
        for ours, theirs in zip(found, expected, strict=True):
            assert bool(ours) is (theirs is not None)
            if ours:
                assert_bitwise(ours[i], theirs)
        assert_bitwise(own_pairs[i], pairs[i])
        if delayed:
            assert_bitwise(amaxes[i], expected_amaxes[i])


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("shapes", SHAPES)
def test_memory_of_the_kernel(shapes):
    tensors = [torch.randn(shape, device="cuda") for shape in SHAPES[shapes]]
    ones = [torch.ones(1, device="cuda") for _ in tensors]
    pairs = [torch.empty(2, device="cuda") for _ in tensors]
    made(tensors, True, True, ones, [x.clone() for x in ones], fp8.E4M3, pairs)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("expected 2 tensors or none, got 1", {"pairs": [torch.zeros(2)]}),
        ("expected 2 tensors or none, got 1", {"scales": [torch.ones(1)]}),
        ("scales", {"pairs": []}),
        ("expected a row-wise or a column-wise output", {"rowwise": []}),
        ("expected float32 for x, got bfloat16", {"dtype": torch.bfloat16}),
        ("expected tensors, got none", {"count": 0}),
    ],
)
def test_bad_arguments(message, changes):
    count = changes.get("count", 2)
    tensors = [torch.ones(4, 8), torch.ones(4, 8, dtype=changes.get("dtype"))][:count]
    arguments = {
        "pairs": [torch.zeros(2)] * count,
        "rowwise": [torch.empty_like(x, dtype=torch.uint8) for x in tensors],
        "scales": [torch.ones(1)] * count,
        **{name: value for name, value in changes.items() if name not in ("count", "dtype")},
    }
    with pytest.raises((ValueError, TypeError), match=rf"^\[quantize_many\] .*{message}"):
        quantize_many(
            *(tensors, arguments["rowwise"], [], arguments["pairs"]),
            *(arguments["scales"], [], fp8.E4M3),
        )
