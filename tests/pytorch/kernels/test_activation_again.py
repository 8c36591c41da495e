"""The backward of activations, which can also compute the result of the forward again."""

import fp8_reference as fp8
import pytest
import torch
from cases import activation as cases
from cases.activation import inputs
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels import activation as op
from transformer_engine.pytorch.kernels.moments import EMPTY_MOMENTS
from transformer_engine.pytorch.kernels.quantize import quantize


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("name", cases.KINDS)
@pytest.mark.sanitize
def test_the_backward_makes_the_result_of_the_forward_again(name, shape, device):
    """As a plain tensor, also written over `dy`, and as transposed codes; `dx` stays the same.

    The codes are those of delayed and of current scaling.
    """
    for dtype in fp8.HIGH_PRECISION:
        x, dy = inputs(name, *shape, dtype, device)
        kind = op.activation_kind(name)
        scale = torch.tensor([3.0], device=device)
        fp8_of_dx = dict(plain=True, scale=scale, rowwise=True, columnwise=True, dbias=dtype)

        def backward(amax, x=x, dy=dy, kind=kind, fp8_of_dx=fp8_of_dx, **again):
            return op.activation_backward(dy.clone(), x, kind, amax=amax, **fp8_of_dx, **again)

        y, _, columns, scales = op.activation_forward(x, kind, scale=scale, columnwise=True)
        expected = backward(amax := torch.zeros(1, device=device))
        own = dy.clone()
        fp8_of_dx["amax"] = torch.zeros(1, device=device)
        in_place = op.activation_backward(own, x, kind, **fp8_of_dx, again=own)
        assert_bitwise(own, y)
        assert torch.equal(fp8_of_dx.pop("amax"), amax)
        apart, codes = torch.empty_like(y), torch.empty_like(columns)
        results = [in_place, backward(amax.clone(), again=apart)]
        results.append(backward(amax.clone(), again=codes, again_scales=scales))
        assert_bitwise(apart, y)
        assert torch.equal(codes, columns)
        rounded = dict(again_scales=scales, again_format=6, again_rounded=True)
        results.append(backward(amax.clone(), again=codes, **rounded))
        cast = quantize(y, 6, None, None, scales, False, True, None)
        assert torch.equal(codes, cast[1])
        for result in results:
            for got, want in zip(result, expected, strict=True):
                assert torch.equal(got, want)


def test_the_result_of_the_forward_has_a_shape_a_dtype_and_no_moments(device):
    x, dy = inputs("gelu", 8, 16, torch.bfloat16, device)
    kind = op.activation_kind("gelu")
    with pytest.raises(ValueError, match=r"expected shape \(8, 16\) for y"):
        op.activation_backward(dy, x, kind, again=torch.empty(8, 15, dtype=x.dtype, device=device))
    with pytest.raises(TypeError, match="for y"):
        op.activation_backward(dy, x, kind, again=torch.empty(8, 16, device=device))
    codes = torch.empty(8, 16, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="column-wise output"):
        op.activation_backward(dy, x, kind, again=codes, again_scales=torch.ones(2, device=device))
    row = torch.tensor(EMPTY_MOMENTS, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="expected moments or the result of forward"):
        op.activation_backward(dy, x, kind, moments=row, again=torch.empty_like(dy))
