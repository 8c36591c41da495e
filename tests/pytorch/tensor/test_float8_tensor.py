import copy
import io

import fp8_reference as fp8
import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine import _C
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    float8_tensor,
)


def make(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Float8Tensor]:
    x = torch.randn(4, 6, device=device, dtype=dtype)
    scale = torch.full((1,), 16.0, device=device)
    quantizer = Float8Quantizer(scale, torch.zeros(1, device=device), te.DType.kFloat8E4M3)
    return x, quantizer(x)


def test_looks_like_its_nominal_dtype_and_holds_codes(device: str) -> None:
    x, q = make(device)
    assert isinstance(q, Float8Tensor) and isinstance(q, torch.Tensor)
    assert (q.shape, q.dtype, q.device) == (x.shape, x.dtype, x.device)
    assert_bitwise(q._data, fp8.encode(x.cpu(), fp8.E4M3, 16.0))
    assert_bitwise(q._transpose, q._data.T.contiguous())
    assert q._scale_inv[0].item() == 1 / 16
    assert q._quantizer.amax.item() == x.abs().max().item()
    expected = fp8.decode(q._data.cpu(), fp8.E4M3) / 16
    assert_bitwise(q.dequantize(dtype=torch.float32), expected)
    assert q.dequantize().dtype is torch.bfloat16


def test_operations_run_on_values(device: str) -> None:
    _, q = make(device)
    plain = q.dequantize()
    assert_bitwise(q + 1, plain + 1)
    assert_bitwise(torch.mm(q, plain.T), torch.mm(plain, plain.T))
    assert type(q * 2) is torch.Tensor and type(q[1:3]) is torch.Tensor


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()])
def test_assigning_to_an_index_writes_the_weight(recipe, device: str) -> None:
    with te.quantized_model_init(recipe=recipe):
        weight = te.Linear(128, 128, device=device).weight
    expected = weight.dequantize().clone()
    column = expected[3].clone()
    for index, value in ((3, 0.0), (slice(2, 5), expected[:3] * 2), ((..., 7), column)):
        expected[index] = value
        with torch.no_grad():
            weight[index] = value
        torch.testing.assert_close(weight.dequantize(), expected, rtol=0.07, atol=1e-3)
        expected.copy_(weight.dequantize())
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight[0] = 1.0
    assert_bitwise(weight.dequantize().detach(), expected)


def test_gradients_of_values_that_are_assigned(device: str) -> None:
    x, values = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    x.requires_grad_()
    values.requires_grad_()
    q = Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x)
    q[1] = values
    q.dequantize().sum().backward()
    assert x.grad.sum(1).tolist() == [6.0, 0.0, 6.0, 6.0] and values.grad.tolist() == [1.0] * 6


def test_detach_shares_and_clone_copies(device: str) -> None:
    _, q = make(device)
    assert q.detach()._data is q._data
    twin = q.clone()
    assert isinstance(twin, Float8Tensor) and twin._data.data_ptr() != q._data.data_ptr()
    assert_bitwise(twin._data, q._data)
    assert isinstance(copy.deepcopy(q), Float8Tensor)


def test_view_and_reshape_stay_fp8(device: str) -> None:
    _, q = make(device)
    for shape in [(2, 2, 6), (24,), (4, 2, 3)]:
        v = q.view(shape)
        assert isinstance(v, Float8Tensor) and v.shape == shape
        assert_bitwise(v.dequantize(), q.dequantize().view(shape))
    assert q.view(2, 2, 6)._transpose is q._transpose and q.view(24)._transpose is None
    assert isinstance(q.reshape(24), Float8Tensor)


def test_to_keeps_fp8_unless_the_dtype_changes(device: str) -> None:
    _, q = make(device)
    assert isinstance(q.to("cpu"), Float8Tensor) and isinstance(q.cpu(), Float8Tensor)
    assert isinstance(q.to(torch.bfloat16), Float8Tensor)
    assert type(q.float()) is torch.Tensor
    assert_bitwise(q.float(), q.dequantize(dtype=torch.float32))


def test_writing_in_place_quantises_again(device: str) -> None:
    _, q = make(device)
    expected = q.dequantize() * 2
    q.mul_(2)
    assert isinstance(q, Float8Tensor) and q._transpose is None
    assert_bitwise(q.dequantize(), expected)
    assert_bitwise(q.transposed_codes(), q._data.T.contiguous())


def test_transposed_codes_follow_writes_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x, q = make(device)
        q.transposed_codes()
        q.data.copy_(-x)
        assert_bitwise(q.transposed_codes(), q._data.T.contiguous())


def test_transposed_codes_are_made_anew_in_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a capture have not run yet, and the codes may change before a replay."""
    first, second = (make("cpu")[1] for _ in range(2))
    known = first.transposed_codes()
    second.update_usage(columnwise_usage=False)
    with monkeypatch.context() as capture:
        capture.setattr(float8_tensor, "is_capturing", lambda: True)
        assert first.transposed_codes() is not known
        assert_bitwise(second.transposed_codes(), second._data.T.contiguous())
    assert first.known_transpose is known and second._transpose is None


def test_copying_both_ways(device: str) -> None:
    x, q = make(device)
    other = make(device)[1]
    other.copy_(q)
    assert_bitwise(other._data, q._data)
    plain = torch.empty_like(x)
    plain.copy_(q)
    assert_bitwise(plain, q.dequantize())
    q.copy_(torch.ones_like(x))
    assert_bitwise(q.dequantize(), torch.ones_like(x))


def test_repr_shows_format_scale_and_values() -> None:
    _, q = make("cpu")
    assert repr(q).startswith("Float8Tensor(fp8_dtype=E4M3, scale_inv=0.0625, data=tensor(")


def test_saved_and_loaded_without_running_code() -> None:
    _, q = make("cpu")
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, Float8Tensor)
    assert_bitwise(loaded._data, q._data)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_torchs_names_of_fp8_are_taken(dtype) -> None:
    x = torch.randn(4, 6)
    named = te.DType.kFloat8E4M3 if dtype is torch.float8_e4m3fn else te.DType.kFloat8E5M2
    results = [Float8CurrentScalingQuantizer(d)(x) for d in (dtype, named)]
    assert_bitwise(results[0]._data, results[1]._data)
    assert results[0]._fp8_dtype is named
    with pytest.raises(ValueError, match=r"counterpart in torch, got torch\.bool"):
        Float8CurrentScalingQuantizer(torch.bool)


@pytest.mark.parametrize("kind", [Float8Quantizer, Float8CurrentScalingQuantizer])
def test_what_is_no_tensor_to_quantize(kind) -> None:
    state = (torch.ones(1), torch.zeros(1)) if kind is Float8Quantizer else ()
    quantizer = kind(*state, te.DType.kFloat8E4M3)
    for call in (quantizer, quantizer.quantize):
        with pytest.raises(TypeError, match=rf"^\[{kind.__name__}\] expected tensor .*, got list"):
            call([1.0])
        with pytest.raises(ValueError, match="one dimension or more, got shape \\(\\)"):
            call(torch.tensor(1.0))


def test_scales_that_are_no_tensors() -> None:
    with pytest.raises(TypeError, match="scale and amax to be tensors, got float and Tensor"):
        Float8Quantizer(1.0, torch.zeros(1), te.DType.kFloat8E4M3)


def test_current_scaling_quantizer(device: str) -> None:
    x = torch.randn(4, 6, device=device)
    q = Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, force_pow_2_scales=True)(x)
    scale = 2.0 ** torch.floor(torch.log2(57344.0 / x.abs().max())).item()
    assert q._scale_inv[0].item() == 1 / scale
    assert q._quantizer.quantize(2 * x, out=q) is q


def test_native_code_and_missing_quantizers_refuse_clearly() -> None:
    _, q = make("cpu")
    with pytest.raises(TypeError, match="got a Float8Tensor that has no memory to point at"):
        _C.describe(q)
    bare = Float8Tensor(q.shape, q.dtype, q._data, q._scale_inv, q._fp8_dtype, True)
    assert bare.requires_grad
    bare.requires_grad_(False)
    with pytest.raises(RuntimeError, match="expected a quantizer to write with"):
        bare.mul_(2)


def test_a_reduction_of_amaxes_in_one_process(device):
    """Without torch.distributed the amax is that of the tensor."""
    x, kind = torch.randn(16, 32, device=device), te.DType.kFloat8E4M3
    reducing = te.Float8CurrentScalingQuantizer(kind, with_amax_reduction=True)
    alone = te.Float8CurrentScalingQuantizer(kind)
    assert torch.equal(reducing(x)._data, alone(x)._data)
    # A fused kernel cannot find the scale, and casts of several tensors cannot share a launch.
    assert alone.fused_arguments(None).current and not reducing.fused_arguments(None).current
    assert alone.casts_many and not reducing.casts_many
    with pytest.raises(TypeError, match="expected amax_reduction_group to be a process group"):
        te.Float8CurrentScalingQuantizer(kind, amax_reduction_group="data")


def test_tensors_of_codes(device):
    """Codes and the scale of a quantizer give the tensor that the quantizer has made of values."""
    kind = te.DType.kFloat8E5M2
    scale, amax = torch.tensor([3.0], device=device), torch.zeros(1, device=device)
    quantizer = te.Float8Quantizer(scale, amax, kind)
    made = quantizer(torch.randn(16, 32, device=device).bfloat16())
    scale.copy_(made._scale_inv[1:])
    again = quantizer.create_tensor_from_data(made._data, torch.bfloat16, requires_grad=True)
    assert again.dtype is torch.bfloat16 and again.requires_grad and again._data is made._data
    assert_bitwise(again.dequantize(), made.dequantize())
    scale.fill_(1.0)  # a later update
    assert_bitwise(again.dequantize(), made.dequantize())
    with torch.no_grad():
        again.mul_(2.0)
    assert amax.item() > 0 and again._scale_inv[1].item() == 1.0
    with pytest.raises(TypeError, match=r"expected data to be codes of uint8, got torch\.float32"):
        quantizer.create_tensor_from_data(torch.ones(2))


def test_settings_of_quantizers():
    kind, settings = te.DType.kFloat8E4M3, {"amax_epsilon": 0.5, "force_pow_2_scales": True}
    current = te.Float8CurrentScalingQuantizer(kind, **settings)
    block = te.Float8BlockQuantizer(kind, rowwise=True, columnwise=True, **settings)
    for quantizer in (current, block):
        assert quantizer.amax_epsilon == 0.5 and quantizer.force_pow_2_scales is True
    assert current.is_quantizable(torch.ones(3, 5)) and not block.is_quantizable(torch.ones(3, 5))
