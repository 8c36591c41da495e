"""LogFp8TensorStats against float64 torch."""

from pathlib import Path

import block_reference as blocks
import pytest
import torch
from debug_session import debugging, inspect, logged, section

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)
from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)

RECIPES = {"delayed": DelayedScaling(amax_history_len=4), "blocks": Float8BlockScaling()}
STATS = ["underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse"]
MOST = {E4M3: 448.0, E5M2: 57344.0}
ROUNDINGS = 1 + 2**-22  # rounding errors between the largest magnitude and its scale


def fp8_stats(**more) -> dict:
    return section("LogFp8TensorStats", **{"tensors": ["activation"], "stats": STATS, **more})


def expected(x: torch.Tensor, q: torch.Tensor) -> dict[str, float]:
    """Returns the statistics of a tensor and its cast."""
    exact, cast = x.double(), q.dequantize(dtype=torch.float32).double()
    inverse = q._scale_inv.flatten()[0]
    beyond = (
        x.float().abs() > MOST[int(q._fp8_dtype)] * inverse * ROUNDINGS
    )  # in fp32, as casts are
    lost = (exact != 0) & (cast == 0)
    return {
        "underflows%": 100 * lost.double().mean().item(),
        "overflows%": 100 * beyond.double().mean().item(),
        "scale_inv_min": inverse.item(),
        "scale_inv_max": inverse.item(),
        "mse": (exact - cast).square().mean().item(),
    }


def spread(device: str, rows: int = 64) -> torch.Tensor:
    """Returns values of many magnitudes, and some zeros."""
    x = torch.randn(rows, 64, device=device) * torch.exp2(torch.randint(-20, 6, (rows, 64))).to(
        device
    )
    x[0, :7] = 0
    return x


@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_by_hand(tmp_path: Path, device: str, format: int) -> None:
    x = spread(device)
    scale = torch.tensor([100.0], device=device)
    q = Float8Quantizer(scale, torch.zeros_like(scale), format)(x)
    with debugging(tmp_path, fp8_stats()):
        inspect("fc1", "activation", x, rowwise_quantized_tensor=q, quantizer=q._quantizer)
        debug_api.step()
    found = logged(tmp_path)[0, "fc1", "activation"]
    assert list(found) == STATS
    assert found == pytest.approx(expected(x, q), rel=1e-6)
    assert found["underflows%"] > 0.1 and (format == E5M2 or found["overflows%"] > 1)


def test_alias_and_columnwise(tmp_path: Path, device: str) -> None:
    x = spread(device)
    q = Float8CurrentScalingQuantizer(E4M3)(x)
    stats = ["mse", "mse_columnwise", "fp8_current_scaling_mse"]
    body = section("LogFp8Stats", tensors="activation", stats=stats)
    with debugging(tmp_path, body):
        sides = {"rowwise_quantized_tensor": q, "columnwise_quantized_tensor": q}
        inspect("fc1", "activation", x, **sides, quantizer=q._quantizer)
        debug_api.step()
    found = logged(tmp_path)[0, "fc1", "activation"]
    assert found == pytest.approx(dict.fromkeys(stats, expected(x, q)["mse"]), rel=1e-6)


@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), Float8BlockScaling(use_f32_scales=True)],
    ids=["current", "blocks"],
)
def test_the_element_that_a_scale_comes_from_does_not_overflow(
    recipe: Recipe, tmp_path: Path, device: str
) -> None:
    """The scale is rounded, so the largest value may end slightly above the FP8 maximum."""
    with debugging(tmp_path, fp8_stats(stats=["overflows%"])):
        layer = te.Linear(32, 16, device=device, name="fc1")
        for _ in range(40):
            with te.fp8_autocast(fp8_recipe=recipe):
                layer(torch.randn(16, 32, device=device))
            debug_api.step()
    found = logged(tmp_path)
    assert len(found) == 40
    assert all(values == {"overflows%": 0.0} for values in found.values())


def test_what_if_with_current_scaling(tmp_path: Path, device: str) -> None:
    x = spread(device)
    scale = torch.tensor([1.0], device=device)
    q = Float8Quantizer(scale, torch.zeros_like(scale), E4M3)(x)
    stats = ["mse", "fp8_current_scaling_mse"]
    with debugging(tmp_path, fp8_stats(stats=stats)):
        inspect("fc1", "activation", x, rowwise_quantized_tensor=q, quantizer=q._quantizer)
        debug_api.step()
    found = logged(tmp_path)[0, "fc1", "activation"]
    other = expected(x, Float8CurrentScalingQuantizer(E4M3)(x))["mse"]
    assert found == pytest.approx({stats[0]: expected(x, q)["mse"], stats[1]: other}, rel=1e-6)


def test_what_if_with_delayed_scaling_is_refused(tmp_path: Path) -> None:
    q = Float8CurrentScalingQuantizer(E4M3)(torch.ones(4, 4))
    with (
        debugging(tmp_path, fp8_stats(stats=["fp8_delayed_scaling_mse"])),
        pytest.raises(ValueError, match=r"history.*fp8_current_scaling \(layer fc1, tensor act"),
    ):
        inspect(
            "fc1",
            "activation",
            torch.ones(4, 4),
            rowwise_quantized_tensor=q,
            quantizer=q._quantizer,
        )


def test_unknown_statistics_are_errors_at_load(tmp_path: Path) -> None:
    for stat in ("nvfp4_mse", "current_scaling_mse", "underflow"):
        with pytest.raises(ValueError, match=stat), debugging(tmp_path, fp8_stats(stats=[stat])):
            pass


def test_tensors_in_high_precision_are_skipped_with_one_warning(tmp_path: Path) -> None:
    with (
        debugging(tmp_path, fp8_stats()),
        pytest.warns(UserWarning, match="Skipping stats collection for layer fc1, tensor act") as w,
    ):
        for _ in range(3):
            inspect("fc1", "activation", torch.ones(4, 4))
            debug_api.step()
    assert len(w) == 1
    assert logged(tmp_path) == {}


def test_the_warning_points_at_the_call_of_the_layer(tmp_path: Path) -> None:
    layer = te.Linear(16, 16, device="cpu")
    with debugging(tmp_path, fp8_stats()), pytest.warns(UserWarning, match="Skipping") as caught:
        layer(torch.ones(4, 16))
    assert caught[0].filename == __file__


def test_parameters_in_fp8_have_scales_alone(tmp_path: Path, device: str) -> None:
    q = Float8CurrentScalingQuantizer(E4M3)(spread(device))
    with debugging(tmp_path, fp8_stats(tensors=["weight"])):
        inspect("fc1", "weight", None, rowwise_quantized_tensor=q, quantizer=q._quantizer)
        debug_api.step()
    inverse = q._scale_inv.flatten()[0].item()
    found = logged(tmp_path)[0, "fc1", "weight"]
    assert found == {"scale_inv_min": inverse, "scale_inv_max": inverse}


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()])
@pytest.mark.parametrize("rows", [32, 21])
def test_operands_of_a_linear(tmp_path: Path, device: str, recipe, rows: int) -> None:
    layer = te.Linear(64, 48, device=device, name="layer")
    kinds = ["activation", "weight", "gradient"]
    parts: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}
    with debugging(tmp_path, fp8_stats(tensors=kinds)):
        for _ in range(2):
            x = spread(device, rows).requires_grad_()
            with te.fp8_autocast(fp8_recipe=recipe):
                y = layer(x)
            upstream = torch.randn_like(y) * 1e-3
            y.backward(upstream)
            for kind, tensor in zip(kinds, (x, layer.weight, upstream), strict=True):
                parts[kind].append(tensor.detach())
            debug_api.step()
    found = logged(tmp_path)
    for (iteration, _, kind), values in found.items():
        format = E5M2 if kind == "gradient" else E4M3
        x = parts[kind][iteration]
        quantizer = Float8CurrentScalingQuantizer(format)
        if isinstance(recipe, DelayedScaling):
            scale = torch.tensor([1 / values["scale_inv_min"]], device=device)
            quantizer = Float8Quantizer(scale, torch.zeros_like(scale), format)
        assert values == pytest.approx(expected(x, quantizer(x)), rel=1e-5, abs=1e-12)
    assert len(found) == 6


def of_blocks(x: torch.Tensor, dimensions: int, columnwise: bool) -> dict[str, float]:
    """Returns the statistics of a tensor and its cast in blocks."""
    matrix = x.detach().cpu().reshape(-1, x.shape[-1])
    matrix = matrix.t().contiguous() if columnwise else matrix
    codes, stored = blocks.quantize(matrix, dimensions)
    ones = torch.full_like(codes, 0x38)  # the code of 1
    inverse = blocks.dequantize(ones, stored, dimensions)
    cast = blocks.dequantize(codes, stored, dimensions).double()
    lost = (matrix != 0) & (cast == 0)
    return {
        "underflows%": 100 * lost.double().mean().item(),
        "overflows%": 100
        * (matrix.float().abs() > 448 * inverse * ROUNDINGS).double().mean().item(),
        "scale_inv_min": inverse.min().item(),
        "scale_inv_max": inverse.max().item(),
        "mse": (matrix.double() - cast).square().mean().item(),
    }


def both_directions(x: torch.Tensor, dimensions: int, prefix: str = "") -> dict[str, float]:
    return {
        f"{prefix}{stat}{'_columnwise' * columnwise}": value
        for columnwise in (False, True)
        for stat, value in of_blocks(x, dimensions, columnwise).items()
    }


@pytest.mark.parametrize("dimensions", [1, 2])
def test_blocks_by_hand(tmp_path: Path, device: str, dimensions: int) -> None:
    x = spread(device, 200)
    quantizer = Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions
    )
    q = quantizer(x)
    wanted = both_directions(x, dimensions)
    with debugging(tmp_path, fp8_stats(stats=list(wanted))):
        sides = {"rowwise_quantized_tensor": q, "columnwise_quantized_tensor": q}
        inspect("fc1", "activation", x, **sides, quantizer=quantizer)
        debug_api.step()
    assert logged(tmp_path)[0, "fc1", "activation"] == pytest.approx(wanted, rel=1e-6)
    assert wanted["underflows%"] > 0
    assert dimensions == 2 or wanted["scale_inv_max"] > wanted["scale_inv_min"]


@pytest.mark.parametrize("rows", [32, 150, 21])
@pytest.mark.parametrize("recipe", ["delayed", "blocks"])
def test_blocks_of_a_linear_in_use_or_what_if(
    tmp_path: Path, device: str, rows: int, recipe: str
) -> None:
    layer = te.Linear(64, 48, device=device, name="layer")
    kinds = ["activation", "weight", "gradient"]
    prefix = "" if recipe == "blocks" else "fp8_block_scaling_"
    stats = list(both_directions(torch.ones(1, 1), 1, prefix))
    with debugging(tmp_path, fp8_stats(tensors=kinds, stats=stats)):
        for _ in range(2):
            x = spread(device, rows).requires_grad_()
            with te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
                y = layer(x)
            upstream = torch.randn_like(y) * 1e-3
            y.backward(upstream)
        debug_api.step()
    found = logged(tmp_path)
    assert found[0, "layer", "weight"] == pytest.approx(
        both_directions(layer.weight, 2, prefix), rel=1e-5
    )
    last = {"activation": x, "gradient": upstream}
    for kind, tensor in last.items():
        ours = found[0, "layer", kind]
        most = both_directions(tensor, 1, prefix)
        assert list(ours) == stats
        for side in ("", "_columnwise"):
            name = f"{prefix}scale_inv_max{side}"
            assert ours[name] >= most[name] and ours[f"{prefix}mse{side}"] > 0


def test_parameters_in_fp8_blocks_have_scales_alone(tmp_path: Path, device: str) -> None:
    x = spread(device, 200)
    quantizer = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)
    q = quantizer(x)
    with debugging(tmp_path, fp8_stats(tensors=["weight"])):
        inspect("fc1", "weight", None, rowwise_quantized_tensor=q, quantizer=quantizer)
        debug_api.step()
    scales = {k: v for k, v in of_blocks(x, 2, False).items() if k.startswith("scale")}
    assert logged(tmp_path)[0, "fc1", "weight"] == scales
