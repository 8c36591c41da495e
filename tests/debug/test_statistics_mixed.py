"""Statistics together with features that modify or inspect the same tensors."""

from pathlib import Path

import pytest
import torch
from debug_session import Config, debugging, logged, section
from statistics_reference import ALL, assert_statistics, reference

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

RESULTS = ["output", "dgrad", "wgrad"]
DUMP = section("DumpTensors", tensors=["activation", *RESULTS], high_precision_tensor=True)
MSE = section("LogFp8TensorStats", tensors=["activation"], stats=["mse", "mse_columnwise"])


def _step(folder: Path, device: str, *sections: dict) -> tuple[torch.Tensor, dict]:
    """Trains one step; returns an input that the amax history has not seen, and its statistics."""
    layer = te.Linear(64, 32, device=device, name="layer")
    x = (100 * torch.randn(32, 64, device=device)).requires_grad_()
    with debugging(folder, *sections):
        with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
            y = layer(x)
        y.sum().backward()
        debug_api.step()
    return x.detach(), logged(folder)[0, "layer", "activation"]


def _error(x: torch.Tensor, scale: float | None = None) -> float:
    """Returns the mean squared error of a cast; by default the scale is that of the tensor."""
    if scale is None:
        cast = Float8CurrentScalingQuantizer(E4M3)(x).dequantize()
    else:
        cast = (x * scale).to(torch.float8_e4m3fn).float() / scale
    return (x.double() - cast.double()).square().mean().item()


def test_a_direction_in_high_precision_has_no_casts(tmp_path: Path, device: str) -> None:
    disabled = section("DisableFP8GEMM", gemms=["fprop"])
    with pytest.warns(UserWarning, match=r"not quantised to FP8 \(rowwise\)") as caught:
        x, found = _step(tmp_path, device, MSE, disabled)
    assert len(caught) == 1
    assert found == {"mse_columnwise": pytest.approx(_error(x, 1.0), rel=1e-5)}


def test_each_direction_has_the_casts_that_its_gemm_takes(tmp_path: Path, device: str) -> None:
    scaled = section("PerTensorScaling", gemms=["wgrad"], tensors=["activation"])
    x, found = _step(tmp_path, device, MSE, scaled)
    assert found == pytest.approx({"mse": _error(x, 1.0), "mse_columnwise": _error(x)}, rel=1e-5)


@pytest.mark.parametrize("trains", [True, False])
def test_activations_under_torch_autocast(tmp_path: Path, device: str, trains: bool) -> None:
    """They have the dtype of the autocast, also if a norm casts its fp32 values to FP8 at once."""
    options = {"device": device, "name": "layer"}
    layer = te.LayerNormLinear(64, 32, **options)
    twin = te.LayerNormLinear(64, 32, return_layernorm_output=True, **options)
    x = torch.randn(32, 64, device=device)
    moments = section("LogTensorStats", tensors=["activation"], stats=list(ALL))
    with torch.autocast(device, torch.bfloat16), te.fp8_autocast(fp8_recipe=DelayedScaling()):
        _, normed = twin(x)
        with debugging(tmp_path, moments), torch.set_grad_enabled(trains):
            layer(x)
            debug_api.step()
    assert normed.dtype is torch.bfloat16
    assert_statistics(logged(tmp_path)[0, "layer", "activation"], reference(normed))


def test_others_may_look_at_the_same_tensor(tmp_path: Path, device: str) -> None:
    moments = section("LogTensorStats", tensors=["activation"], stats=list(ALL))
    x, found = _step(tmp_path, device, moments, DUMP)
    assert_statistics(found, reference(x))
    (file,) = (tmp_path / "tensor_dumps").rglob("*activation*.pt")
    assert torch.load(file, weights_only=True)["high_precision"].equal(x.cpu())


@pytest.mark.parametrize("beside", [[], [DUMP]], ids=["alone", "beside DumpTensors"])
def test_a_direction_that_no_gemm_takes_has_no_casts(
    tmp_path: Path, device: str, beside: list[Config]
) -> None:
    layer = te.Linear(64, 32, device=device, name="layer")
    x = torch.randn(32, 64, device=device)
    with debugging(tmp_path, MSE, *beside):
        with (
            pytest.warns(UserWarning, match="no GEMM takes it so"),
            torch.no_grad(),
            te.fp8_autocast(fp8_recipe=DelayedScaling()),
        ):
            layer(x)
        debug_api.step()
    assert logged(tmp_path)[0, "layer", "activation"] == {
        "mse": pytest.approx(_error(x, 1.0), rel=1e-5)
    }


@pytest.mark.parametrize("beside", [[], [DUMP]], ids=["alone", "beside DumpTensors"])
def test_statistics_are_of_the_result_that_a_feature_has_modified(
    tmp_path: Path, device: str, beside: list[Config]
) -> None:
    layer = te.Linear(64, 32, device=device, name="layer")
    fake = section(
        "FakeQuant", gemms=["fprop", "dgrad", "wgrad"], tensors=RESULTS, quant_format="FP8E5M2"
    )
    moments = section("LogTensorStats", tensors=RESULTS, stats=list(ALL))
    x = torch.randn(32, 64, device=device, requires_grad=True)
    with debugging(tmp_path, fake, moments, *beside):
        y = layer(x)
        y.backward(torch.randn_like(y))
        debug_api.step()
    for tensor, value in zip(RESULTS, (y, x.grad, layer.weight.grad), strict=True):
        assert_statistics(logged(tmp_path)[0, "layer", tensor], reference(value))


SUMS = section("LogTensorStats", tensors=["activation"], stats=["l1_norm"])
OVERRIDES = """
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.log_tensor_stats import LogTensorStats


@Registry.register_feature(namespace="transformer_engine")
class OfLargeTensors(LogTensorStats):
    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, tp_group):
        if tensor.shape[0] > 1:
            super().inspect_tensor(config, layer_name, tensor_name, tensor, iteration, tp_group)


@Registry.register_feature(namespace="transformer_engine")
class OfLaterSteps(LogTensorStats):
    @api_method
    def inspect_tensor_enabled(self, iteration):
        return iteration > 0, iteration + 1
"""


@pytest.mark.parametrize(
    ("feature", "beside", "expected"),
    [
        ("OfLargeTensors", [], {0: 8.0, 1: 8.0}),
        ("OfLaterSteps", [], {1: 12.0}),
        ("OfLargeTensors", [SUMS], {0: 12.0, 1: 12.0}),  # counts once, as without the subclass
    ],
)
def test_a_subclass_may_define_a_call_anew(
    tmp_path: Path, feature: str, beside: list[Config], expected: dict
) -> None:
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "own.py").write_text(OVERRIDES)
    layer = te.Linear(4, 4, device="cpu", name="layer")
    own = section(feature, tensors=["activation"], stats=["l1_norm"])
    with debugging(tmp_path, own, *beside, feature_dirs=[str(tmp_path / "features")]):
        for _ in range(2):
            for rows in (1, 2):
                layer(torch.ones(rows, 4)).sum().backward()
            layer.eval()
            with torch.no_grad():
                layer(torch.ones(2, 4))
            layer.train()
            debug_api.step()
    found = {step: values["l1_norm"] for (step, _, _), values in logged(tmp_path).items()}
    assert found == expected
