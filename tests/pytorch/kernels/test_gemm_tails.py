"""GEMMs add all terms of each sum, including terms after the last whole tile along k.

Some kernels of cuBLASLt 12.8 to 13.2 leave these terms out, see `csrc/cuda/policy/split_k.h`.
cuBLASLt chooses such kernels for long sums with few results: weight gradients of many tokens.
"""

import pytest
import torch
from gemm_reference import E4M3

from transformer_engine.pytorch.dtypes import TORCH_FP8
from transformer_engine.pytorch.kernels.gemm import gemm

PLAIN_LENGTHS = (8193, 8648, 11528, 57608)
FP8_LENGTHS = (8208, 11536, 23056, 57616)
SIZES = (8, 16, 64, 256, 4096)


def with_terms(shape, axis, first, dtype, device):
    """A matrix with zeros before index `first` of an axis, and ones from there on."""
    x = torch.ones(shape, device=device, dtype=torch.float32)
    x.narrow(axis, 0, first).zero_()
    return x.to(dtype)


def product(m, n, k, first, dtype, layout, device):
    """The product of two such matrices, each element of which is `k - first`."""
    transposed = {"a_transposed": layout[0] == "T", "b_transposed": layout[1] == "T"}
    shapes = [
        (k, size) if side == "T" else (size, k) for size, side in zip((m, n), layout, strict=True)
    ]
    fp8 = dtype not in (torch.float32, torch.float16, torch.bfloat16)
    a, b = (with_terms(shape, shape.index(k), first, dtype, device) for shape in shapes)
    if not fp8:
        return gemm(a, b, torch.float32, **transposed, allow_tf32=True)
    one = torch.ones(1, device=device)
    codes = (a.view(torch.uint8), b.view(torch.uint8))
    return gemm(*codes, torch.float32, one, one, E4M3, E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["TT", "NN", "NT"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("k", PLAIN_LENGTHS)
def test_last_terms(k, dtype, layout):
    for m in (1, *SIZES):
        for n in SIZES:
            first = k - k % 64
            d = product(m, n, k, first, dtype, layout, "cuda")
            assert (d == k - first).all(), (m, n)


@pytest.mark.gpu
@pytest.mark.parametrize("k", FP8_LENGTHS)
def test_last_terms_in_fp8(k):
    for m in SIZES:
        for n in SIZES[1:]:
            first = k - k % 128
            d = product(m, n, k, first, TORCH_FP8[E4M3], "NN", "cuda")
            assert (d == k - first).all(), (m, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradient_of_a_narrow_layer(dtype, device):
    torch.manual_seed(0)
    for k in PLAIN_LENGTHS:
        grad = torch.randn(k, 8, device=device).to(dtype)
        x = torch.randn(k, 256, device=device).to(dtype)
        d = gemm(grad, x, torch.float32, a_transposed=True, b_transposed=True)
        expected = grad.double().t() @ x.double()
        assert (d - expected).norm() < 1e-4 * expected.norm()
