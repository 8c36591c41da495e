"""gemm of FP8 blocks on both backends: each supported pair of block shapes, against float64."""

import block_reference as blocks
import gemm_reference as ref
import pytest
import torch
from gemm_reference import E4M3, E5M2, assert_close, product, slack

from transformer_engine import _C, _devices
from transformer_engine.pytorch.kernels import gemm as gemm_kernel
from transformer_engine.pytorch.kernels.gemm import gemm, gemm_into
from transformer_engine.pytorch.kernels.memory_views import tensor_at
from transformer_engine.pytorch.scale_layout import block_layout

PAIRS = [(1, 1), (1, 2), (2, 1)]
# Whole blocks, parts of blocks along every axis, the smallest sizes.
SHAPES = [(256, 384, 512), (264, 144, 528), (8, 16, 16), (136, 272, 144)]


def operand(rows, k, dimensions, format=E4M3):
    """A random matrix in FP8 whose magnitudes differ from block to block."""
    patches = torch.exp2(torch.randint(-6, 4, (-(-rows // 64), -(-k // 64))).float())
    x = torch.randn(rows, k)
    x *= patches.repeat_interleave(64, 0).repeat_interleave(64, 1)[:rows, :k]
    codes, inverses = blocks.quantize(x, dimensions, format, power_of_2=False)
    values = blocks.dequantize(codes, inverses, dimensions, format).double()
    return ref.Operand(codes, values, inverses, block_layout(dimensions).code(format))


def both(shape, pair, device):
    m, n, k = shape
    a, b = operand(m, k, pair[0]), operand(n, k, pair[1])
    return a.to(device), b.to(device)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out", ref.PLAIN_TYPES, ids=str)
def test_product(device, shape, pair, out):
    a, b = both(shape, pair, device)
    d = gemm(a.data, b.data, out, **ref.arguments(a, b))
    assert d.shape == shape[:2]
    assert_close(d, product(a, b), slack(a, b, device))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("out", ref.PLAIN_TYPES, ids=str)
def test_bias(device, pair, out):
    a, b = both((136, 272, 144), pair, device)
    bias = torch.randn(272).to(torch.float16 if out is torch.float16 else torch.bfloat16)
    d = gemm(a.data, b.data, out, **ref.arguments(a, b), bias=bias.to(device))
    assert_close(d, product(a, b) + bias.double(), slack(a, b, device))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_into(device, pair, out, accumulate):
    a, b = both((136, 272, 144), pair, device)
    before = torch.randn(136, 272).to(out)
    d = before.clone().to(device)
    gemm_into(d, a.data, b.data, **ref.arguments(a, b), accumulate=accumulate)
    expected = product(a, b) + (before.double() if accumulate else 0)
    inside = slack(a, b, device) + ref.rounding(product(a, b), out, device)
    assert_close(d, expected, inside)


def test_powers_of_two_change_no_sum(device):
    x, w = (torch.randint(-8, 9, (rows, 256)).float() for rows in (64, 32))
    codes = [t.to(torch.float8_e4m3fn).view(torch.uint8).to(device) for t in (x, w)]
    scales = [torch.full((2, 64), 0.25, device=device), torch.full((1, 4), 0.5, device=device)]
    formats = [block_layout(1).code(E4M3), block_layout(2).code(E4M3)]
    d = gemm(*codes, torch.float32, *scales, *formats)
    assert torch.equal(d.cpu(), (x @ w.t()) * 0.125)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (NotImplementedError, "Only 1D by 1D, 1D by 2D, and 2D by 1D", {"pair": (2, 2)}),
        (ValueError, "dimension requirement", {"shape": (12, 16, 16)}),
        (NotImplementedError, "CUBLAS_STATUS_NOT_SUPPORTED", {"fast_accumulation": True}),
    ],
)
def test_refused(error, message, change):
    a, b = both(change.pop("shape", (16, 16, 16)), change.pop("pair", (1, 2)), "cpu")
    with pytest.raises(error, match=message):
        gemm(a.data, b.data, torch.bfloat16, **ref.arguments(a, b), **change)


@pytest.mark.parametrize("formats", [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_refuses_e5m2(formats):
    a, b = (operand(16, 16, dimensions + 1, f) for dimensions, f in enumerate(formats))
    with pytest.raises(NotImplementedError, match="float8_e4m3 operands with block scales"):
        gemm(a.data, b.data, torch.bfloat16, **ref.arguments(a, b))


@pytest.mark.gpu
def test_no_kernel_is_announced_once_and_torch_multiplies(monkeypatch):
    if not _devices.device_limits(0).block_scales:
        pytest.skip("no product of blocks has a kernel")
    a, b = both((136, 272, 144), (1, 2), "cuda")
    arguments = (a.data, b.data, torch.float32, a.scales, b.scales, a.format, b.format)
    by_library = gemm(*arguments)
    monkeypatch.setattr(gemm_kernel, "_C", NoKernels())
    gemm_kernel._announce_slow_product.cache_clear()
    with pytest.warns(UserWarning, match="no kernel for block scales at m = 136, n = 272, k = 144"):
        by_torch = gemm(*arguments)
    for d in (by_torch, by_library):
        assert_close(d, product(a, b), slack(a, b, "cuda"))
    assert torch.equal(gemm(*arguments), by_torch)


class NoKernels:
    """Stands for `_C` on a machine where cuBLASLt has no kernel for the product."""

    def __getattr__(self, name):
        return getattr(_C, name)

    def gemm(self, *arguments):
        return False


@pytest.mark.gpu
def test_the_definition_reads_and_writes_recorded_memory():
    x = torch.arange(6, dtype=torch.bfloat16, device="cuda").view(2, 3)
    view = tensor_at(x.data_ptr(), 4, (2, 3), 0)
    view += 1
    assert torch.equal(x.cpu(), torch.arange(1, 7, dtype=torch.bfloat16).view(2, 3))


def test_refuses_one_scale_beside_blocks():
    a, b = operand(16, 16, 1), ref.fp8(16, 16, E4M3)
    with pytest.raises(NotImplementedError, match="block scales in both operands or in neither"):
        gemm(a.data, b.data, torch.bfloat16, **ref.arguments(a, b))


def test_refuses_scales_of_another_shape():
    a, b = both((16, 16, 160), (1, 2), "cpu")
    a.scales = a.scales[:, :12].contiguous()
    with pytest.raises(ValueError, match=r"expected shape \(2, 16\) for the scales"):
        gemm(a.data, b.data, torch.bfloat16, **ref.arguments(a, b))
