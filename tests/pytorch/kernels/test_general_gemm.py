"""`general_gemm`: layouts, bias, GELU and FP8, compared with float64."""

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.module.base import get_workspace

M, N, K = 32, 48, 64
SHAPES = {"TN": ((N, K), (M, K)), "NN": ((K, N), (M, K)), "NT": ((K, N), (K, M))}


def factors(layout: str, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = SHAPES[layout]
    values = torch.randn(*a, device=device), torch.randn(*b, device=device)
    return values[0].to(dtype), values[1].to(dtype)


def defined(layout: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    left = b.double().T if layout[1] == "T" else b.double()
    return left @ (a.double().T if layout[0] == "T" else a.double())


def assert_near(got: torch.Tensor, expected: torch.Tensor, bound: float = 2**-7) -> None:
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error.item() < bound


@pytest.mark.parametrize("layout", SHAPES)
def test_layouts(layout: str, device: str) -> None:
    a, b = factors(layout, device, torch.bfloat16)
    out, *rest = general_gemm(a, b, workspace=get_workspace(), layout=layout)
    assert rest == [None, None, None] and out.dtype is torch.bfloat16
    assert_near(out, defined(layout, a, b))
    wide = general_gemm(a, b, out_dtype=torch.float32, layout=layout)[0]
    assert wide.dtype is torch.float32
    assert_near(wide, defined(layout, a, b), 2**-9)


@pytest.mark.parametrize("layout", SHAPES)
def test_fp8_factors(layout: str, device: str) -> None:
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    a, b = (quantizer(x) for x in factors(layout, device, torch.bfloat16))
    out = general_gemm(a, b, layout=layout, use_split_accumulator=True)[0]
    assert_near(out, defined(layout, a.dequantize(), b.dequantize()))


@pytest.mark.parametrize("layout", SHAPES)
def test_factors_in_blocks(layout: str, device: str) -> None:
    def quantizer(dimensions: int) -> te.Float8BlockQuantizer:
        return te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions
        )

    a, b = factors(layout, device, torch.bfloat16)
    for dimensions in (1, 2):
        out = general_gemm(quantizer(dimensions)(a), quantizer(1)(b), layout=layout)[0]
        assert_near(out, defined(layout, a, b), 2**-4)


def test_a_factor_in_blocks_without_its_side_is_refused() -> None:
    sides = {"rowwise": True, "columnwise": False}
    x = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, **sides)(torch.ones(16, 16))
    with pytest.raises(ValueError, match="expected column-wise data in a Float8BlockwiseQTensor"):
        general_gemm(x, x, layout="NN")


def test_bias_and_gelu(device: str) -> None:
    a, b = factors("TN", device, torch.bfloat16)
    bias = torch.randn(N, device=device, dtype=torch.bfloat16)
    out, grad, before, _ = general_gemm(a, b, bias=bias, gelu=True)
    value = defined("TN", a, b) + bias.double()
    assert grad is None
    assert_near(before, value)
    assert_near(out, torch.nn.functional.gelu(value, approximate="tanh"), 2**-6)


@pytest.mark.parametrize("gelu", [False, True])
def test_derivative_of_gelu_and_bias_gradient(gelu: bool, device: str) -> None:
    a, dy = factors("NN", device, torch.bfloat16)
    before = torch.randn(M, N, device=device, dtype=torch.bfloat16)
    bias = torch.empty(N, device=device)
    out, bias_grad, none, _ = general_gemm(
        a, dy, layout="NN", gelu=gelu, gelu_in=before, bias=bias, grad=True
    )
    value = defined("NN", a, dy)
    expected = torch.ops.aten.gelu_backward(value, before.double(), approximate="tanh")
    assert none is None and bias_grad.dtype is torch.float32
    assert_near(out, expected, 2**-6)
    assert_near(bias_grad, expected.sum(0), 2**-6)


def test_gelu_into_out(device: str) -> None:
    a, b = factors("TN", device, torch.bfloat16)
    target = torch.empty(M, N, device=device, dtype=torch.bfloat16)
    out, _, before, _ = general_gemm(a, b, gelu=True, out=target)
    assert out is target
    assert_near(before, defined("TN", a, b))
    assert_near(target, torch.nn.functional.gelu(defined("TN", a, b), approximate="tanh"), 2**-6)


def test_sum_with_a_bias(device: str) -> None:
    a, b = factors("TN", device, torch.bfloat16)
    bias = torch.randn(N, device=device, dtype=torch.bfloat16)
    target = torch.ones(M, N, device=device, dtype=torch.bfloat16)
    assert general_gemm(a, b, out=target, accumulate=True, bias=bias)[0] is target
    assert_near(target, 1 + defined("TN", a, b) + bias.double())


def test_bias_gradient_and_accumulation(device: str) -> None:
    x, dy = factors("NT", device, torch.bfloat16)
    bias = torch.empty(M, device=device, dtype=torch.bfloat16)
    main_grad = torch.ones(M, N, device=device)
    out, bias_grad, *_ = general_gemm(
        x, dy, layout="NT", out=main_grad, accumulate=True, bias=bias, grad=True
    )
    assert out is main_grad and bias_grad.dtype is torch.bfloat16
    assert_near(main_grad, 1 + defined("NT", x, dy), 2**-9)
    assert_near(bias_grad, dy.double().sum(0))


def test_quantised_result(device: str) -> None:
    a, b = factors("TN", device, torch.bfloat16)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    out = general_gemm(a, b, quantization_params=quantizer)[0]
    assert isinstance(out, te.Float8Tensor)
    assert_bitwise(out._data, quantizer(general_gemm(a, b)[0])._data)


def test_refusals() -> None:
    x = torch.ones(16, 16)
    fp8 = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x)
    with pytest.raises(ValueError, match="expected layout TN, NN or NT, got 'TT'"):
        general_gemm(x, x, layout="TT")
    with pytest.raises(ValueError, match="expected out with accumulate=True"):
        general_gemm(x, x, accumulate=True)
    with pytest.raises(TypeError, match=r"both factors in FP8 .* got Tensor and Float8Tensor"):
        general_gemm(x, fp8)
    with pytest.raises(NotImplementedError, match="accumulate=True with GELU"):
        general_gemm(x, x, out=x, accumulate=True, gelu=True)
    with pytest.raises(NotImplementedError, match="the bias gradient of FP8 factors"):
        general_gemm(fp8, fp8, bias=x[0], grad=True)
    blocks = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True)(x)
    with pytest.raises(RuntimeError, match="Epilogue requested outside of the available"):
        general_gemm(blocks, blocks, gelu=True)
    with pytest.raises(NotImplementedError, match=r"alpha=2\.0"):
        general_gemm(x, x, alpha=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument speed"):
        general_gemm(x, x, speed=1)
