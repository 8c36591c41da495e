"""The built-in features that choose precisions or modify tensors, against their definitions."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from debug_session import debugging, section
from fake_manager import session
from fused_layers import build as transformer_layer
from hook_cases import MODULES, build, train
from precisions import RECIPES, scope
from rulers import assert_equal

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
)
from transformer_engine.debug.features.disable_fp8_gemm import DisableFP8GEMM
from transformer_engine.debug.features.disable_fp8_layer import DisableFP8Layer
from transformer_engine.debug.features.fake_quant import FakeQuant
from transformer_engine.debug.features.per_tensor_scaling import PerTensorScaling
from transformer_engine.pytorch.tensor import Float8Tensor

F8 = {"FP8E4M3": torch.float8_e4m3fn, "FP8E5M2": torch.float8_e5m2}
E4M3 = {"quant_format": "FP8E4M3"}
OPERANDS = ["activation", "weight", "gradient"]


def fake_quantized(x: torch.Tensor, quant_format: str, margin: int) -> torch.Tensor:
    """Computes the definition: scale = fp8_max / (amax * 2^margin), cast to FP8, and back."""
    kind = F8[quant_format]
    largest = torch.finfo(kind).max
    scale = largest / (x.float().abs().max() * 2.0**margin)
    return ((x.float() * scale).clamp(-largest, largest).to(kind).float() / scale).to(x.dtype)


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("quant_format", F8)
def test_fake_quant_is_its_definition(quant_format: str, margin: int) -> None:
    x = torch.randn(3, 5, 7, dtype=torch.bfloat16)
    config = {"quant_format": quant_format, "margin": margin}
    arguments = {"layer_name": "l", "gemm": "fprop", "tensor_name": "activation"}
    made = FakeQuant().modify_tensor(config, tensor=x, dtype=torch.bfloat16, **arguments)
    expected = fake_quantized(x, quant_format, margin)
    torch.testing.assert_close(made, expected, rtol=2**-8, atol=0)  # 1/scale is rounded to fp32
    out = torch.empty_like(x)
    assert FakeQuant().modify_tensor(config, tensor=x, out=out, **arguments) is None
    assert torch.equal(out, made)


@pytest.mark.parametrize("feature", ["FakeQuant", "PerTensorScaling"])
def test_margins_are_exponents_of_fp32(tmp_path: Path, feature: str) -> None:
    keys = {"gemms": ["fprop"], "tensors": ["weight"]}
    keys |= {"quant_format": "E4M3"} if feature == "FakeQuant" else {}
    for margin in (-126, 127):
        with debugging(tmp_path, section(feature, **keys, margin=margin)):
            pass
    for margin in (-127, 128, 10000):
        expected = f"margin: expected an int of at least -126 and at most 127, got {margin}"
        with (
            pytest.raises(ValueError, match=expected),
            debugging(tmp_path, section(feature, **keys, margin=margin)),
        ):
            pass


@pytest.mark.parametrize("special", [0.0, float("inf"), float("nan")])
def test_fake_quant_of_special_values(special: float) -> None:
    x = torch.tensor([[special, special, 2.0 if special else 0.0]])
    made = FakeQuant().modify_tensor({"quant_format": "E4M3"}, "l", "fprop", "weight", x)
    expected = {"0.0": [0.0, 0.0, 0.0], "inf": [448.0, 448.0, 2.0], "nan": [special, special, 2.0]}
    assert torch.equal(made.nan_to_num(-1), torch.tensor([expected[str(special)]]).nan_to_num(-1))
    empty = FakeQuant().modify_tensor(
        {"quant_format": "E4M3"}, "l", "fprop", "weight", torch.empty(0, 3)
    )
    assert empty.shape == (0, 3)


def quantized(x: torch.Tensor) -> torch.Tensor:
    return FakeQuant().modify_tensor(E4M3, "l", "g", "t", x.detach())


@pytest.mark.parametrize("recipe", RECIPES)
def test_fake_quant_of_operands(device: str, recipe: str) -> None:
    module = build("linear", device)
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.randn(16, 48, dtype=torch.bfloat16, device=device)
    te.gemm_report(reset=True)
    with session(("layer", FakeQuant(), {**E4M3, "tensors": OPERANDS})):
        with scope(recipe):
            y = module(x)
        y.backward(dy)
    assert te.gemm_report().total("bf16") == 3
    qx, qw, qdy = (quantized(t).float() for t in (x, module.weight, dy))
    for actual, expected in (
        (y, torch.nn.functional.linear(qx, qw, module.bias.float())),
        (x.grad, qdy @ qw),
        (module.weight.grad, qdy.T @ qx),
        (module.bias.grad, dy.float().sum(0)),
    ):
        torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("gemm", "tensor"),
    [("fprop", "weight"), ("fprop", "activation"), ("dgrad", "gradient"), ("wgrad", "gradient")],
)
def test_fake_quant_of_one_operand_under_torch_autocast(device: str, gemm: str, tensor: str):
    """The other operands of the GEMM are also cast to the dtype of the autocast."""
    module = build("linear", device, torch.float32)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    dy = torch.randn(16, 48, dtype=torch.bfloat16, device=device)
    config = {**E4M3, "gemms": [gemm], "tensors": [tensor]}
    with session(("layer", FakeQuant(), config)), torch.autocast(device, torch.bfloat16):
        y = module(x)
    y.backward(dy)

    def operand(of: str, name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().bfloat16()
        return (quantized(value) if (of, name) == (gemm, tensor) else value).float()

    values = {"activation": x, "weight": module.weight, "gradient": dy}
    fprop, dgrad, wgrad = (
        {name: operand(of, name, value) for name, value in values.items()}
        for of in ("fprop", "dgrad", "wgrad")
    )
    for actual, expected in (
        (y, torch.nn.functional.linear(fprop["activation"], fprop["weight"], module.bias)),
        (x.grad, dgrad["gradient"] @ dgrad["weight"]),
        (module.weight.grad, wgrad["gradient"].T @ wgrad["activation"]),
    ):
        torch.testing.assert_close(actual.float(), expected, rtol=2**-7, atol=1e-2)


def test_fake_quant_of_results(device: str) -> None:
    y, dx, dw, db = train(build("linear", device), None, steps=1)
    with session(("layer", FakeQuant(), {**E4M3, "tensors": ["output", "dgrad", "wgrad"]})):
        actual = train(build("linear", device), None, steps=1)
    assert_equal(actual, [quantized(y), quantized(dx), quantized(dw), db])


def test_fake_quant_of_an_output_to_which_a_residual_is_added(device: str) -> None:
    layer, found = transformer_layer(device), []
    x = torch.randn(2, 16, 64, device=device, dtype=torch.bfloat16)
    handle = layer.layernorm_mlp.register_forward_hook(lambda *args: found.extend(args[-1]))
    layer(x)
    handle.remove()
    branch, residual = found
    with session(("layer.layernorm_mlp.fc2", FakeQuant(), {**E4M3, "tensors": ["output"]})):
        y = layer(x)
    assert_equal([y], [(residual.float() + quantized(branch).float()).bfloat16()])


@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize("name", MODULES)
def test_per_tensor_scaling_of_everything_is_current_scaling(name: str, fp8_format) -> None:
    current = Float8CurrentScaling(fp8_format=fp8_format)
    expected = train(build(name, "cpu"), current)
    te.gemm_report(reset=True)
    with session(("layer", PerTensorScaling(), {"tensors": OPERANDS})) as s:
        actual = train(build(name, "cpu"), DelayedScaling(fp8_format=fp8_format), after_step=s.step)
    report = te.gemm_report()
    assert report.total("fp8") == report.total() > 0
    for a, e in zip(actual, expected, strict=True):
        if a.ndim > 1:
            assert torch.equal(a, e)
        else:  # column sums may use another order
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("margin", [0, 1, 3])
def test_per_tensor_scaling_has_a_margin_and_the_recipes_format(margin: int) -> None:
    x = torch.randn(16, 32)
    for dtype, largest in ((5, 448.0), (6, 57344.0)):
        quantizer = te.Float8CurrentScalingQuantizer(dtype)
        for tensor_name, gemm in (("activation", "fprop"), ("activation", "wgrad")):
            made = PerTensorScaling().modify_tensor(
                {"margin": margin}, "l", gemm, tensor_name, x, 0, quantizer
            )
            assert isinstance(made, Float8Tensor) and int(made._fp8_dtype) == dtype
            scale = largest / (x.abs().max() * 2.0**margin)
            torch.testing.assert_close(1 / made._scale_inv[0], scale)
            assert (made._transpose is not None) == (gemm == "wgrad")
            assert torch.equal(made.transposed_codes(), made._data.T.contiguous())
            before = made._data.clone()
            assert (
                PerTensorScaling().modify_tensor(
                    {"margin": margin}, "l", gemm, tensor_name, 2 * x, 0, quantizer, out=made
                )
                is None
            )
            assert torch.equal(made._data, before) and made._transpose is None


def test_disabled_gemms_win_over_per_tensor_scaling_with_one_warning() -> None:
    for other, config in (
        (DisableFP8GEMM(), {"gemms": ["fprop"]}),
        (FakeQuant(), {"gemms": ["fprop"], "tensors": ["activation"], "quant_format": "E4M3"}),
    ):
        te.gemm_report(reset=True)
        with session(
            ("layer", other, config), ("layer", PerTensorScaling(), {"tensors": ["weight"]})
        ) as s:
            train(build("linear", "cpu"), RECIPES["delayed"], steps=3, after_step=s.step)
        kinds = {(gemm, kind) for _, gemm, kind in te.gemm_report().counts}
        assert kinds == {("fprop", "bf16"), ("dgrad", "fp8"), ("wgrad", "fp8")}
        warnings = [m for m in s.manager.messages if "as it is" in m]
        assert warnings == [
            "layer: PerTensorScaling leaves weight, gemm fprop as it is: another feature runs this "
            "GEMM in high precision"
        ]


@pytest.mark.parametrize(
    ("tensors", "gemms", "said"),
    [
        (["activation"], ["fprop"], "operands of fprop .* got activation alone: add weight"),
        (["gradient"], ["dgrad"], "operands of dgrad .* got gradient alone: add weight"),
        (["weight", "gradient"], ["wgrad"], "operands of wgrad .* got gradient alone: add activ"),
        (["activation", "weight"], ["fprop"], ""),
        (OPERANDS, ["fprop", "dgrad", "wgrad"], ""),
    ],
)
def test_one_scale_beside_blocks_is_refused_before_anything_runs(
    tensors: list[str], gemms: list[str], said: str
) -> None:
    layer = te.Linear(128, 128, device="cpu", name="layer")
    x = torch.randn(128, 128, requires_grad=True)
    config = {"tensors": tensors, "gemms": gemms}
    with session(("layer", PerTensorScaling(), config)):
        refused = pytest.raises(ValueError, match=rf"\[PerTensorScaling\] .*{said}.*layer layer")
        with refused if said else nullcontext(), te.fp8_autocast(fp8_recipe=Float8BlockScaling()):
            layer(x).sum().backward()
        if said and "fprop" not in gemms:  # features are not asked about GEMMs that do not run
            with torch.no_grad(), te.fp8_autocast(fp8_recipe=Float8BlockScaling()):
                layer(x)


def test_per_tensor_scaling_without_fp8_leaves_a_layer_alone() -> None:
    expected = train(build("norm linear", "cpu"), None)
    with session(("layer", PerTensorScaling(), {"tensors": OPERANDS})) as s:
        actual = train(build("norm linear", "cpu"), None, after_step=s.step)
    assert_equal(actual, expected)
    assert sum("the recipe runs this GEMM" in m for m in s.manager.messages) == 6


@pytest.mark.parametrize("feature", [DisableFP8Layer(), DisableFP8GEMM()])
def test_disabled_layer_is_a_run_without_fp8(feature) -> None:
    expected = train(build("mlp", "cpu"), None)
    te.gemm_report(reset=True)
    with session((r"\.fc", feature, {})) as s:
        actual = train(build("mlp", "cpu"), RECIPES["delayed"], after_step=s.step)
    assert_equal(actual, expected)
    assert not te.gemm_report().total("fp8")
