"""Statistics of layers that recompute, accumulate weight gradients, or are captured."""

import copy
from pathlib import Path

import pytest
import torch
from debug_session import debugging, logged, section
from rulers import assert_bitwise
from statistics_reference import ALL, assert_statistics, reference
from torch.utils.checkpoint import checkpoint

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

KINDS = ["activation", "gradient", "weight", "output", "wgrad", "dgrad"]
FP8 = DelayedScaling(amax_history_len=4)


def everything(**more) -> dict:
    return section("LogTensorStats", **{"tensors": KINDS, "stats": list(ALL), **more})


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_counts_once(tmp_path: Path, device: str, reentrant: bool) -> None:
    layer = te.Linear(32, 32, device=device, name="layer")
    x = torch.randn(16, 32, device=device, requires_grad=True)
    with debugging(tmp_path, everything()):
        y = checkpoint(layer, x, use_reentrant=reentrant)
        y.backward(torch.ones_like(y))
        debug_api.step()
    found = logged(tmp_path)
    expected = {
        "activation": x,
        "weight": layer.weight,
        "output": y,
        "gradient": torch.ones_like(y),
        "wgrad": layer.weight.grad,
        "dgrad": x.grad,
    }
    assert {tensor for _, _, tensor in found} == set(expected)
    for tensor, exact in expected.items():
        assert_statistics(found[0, "layer", tensor], reference(exact))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tensor", ["activation", "weight", "output"])
def test_statistics_of_the_forward_alone_change_no_checkpoint(
    tmp_path: Path, device: str, tensor: str, fp8: bool
) -> None:
    """A recompute saves as many tensors as the forward, which `torch.utils.checkpoint` checks.

    This includes layers that recompute activations.
    """
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    layer = te.TransformerLayer(32, 64, 4, **options)
    twin = copy.deepcopy(layer)

    def train(model) -> list[torch.Tensor]:
        found = []
        for step in range(4):
            torch.manual_seed(step)
            x = torch.randn(16, 2, 32, device=device, requires_grad=True)
            with te.fp8_autocast(enabled=fp8, fp8_recipe=FP8):
                y = checkpoint(model, x, use_reentrant=False)
            y.sum().backward()
            found += [y.detach(), x.grad]
            debug_api.step()
        return found

    expected = train(twin)
    config = everything(tensors=[tensor], freq=2)
    with debugging(tmp_path, config):
        actual = train(layer)
    for got, wanted in zip(actual, expected, strict=True):
        assert_bitwise(got, wanted)
    assert {i for i, _, _ in logged(tmp_path)} == {0, 2}


@pytest.mark.parametrize("mode", ["hooks", "reentrant", "te", "te reentrant"])
def test_a_recomputed_fp8_forward_counts_once(tmp_path: Path, mode: str) -> None:
    """Statistics of both directions of every tensor equal those without checkpointing."""
    config = section(
        "LogFp8TensorStats",
        tensors=["activation", "weight", "gradient"],
        stats=["underflows%", "mse", "mse_columnwise", "scale_inv_max_columnwise"],
    )
    function = te.checkpoint if mode.startswith("te") else checkpoint
    logs = []
    for folder, again in (("plain", False), ("again", True)):
        torch.manual_seed(0)
        layer = te.LayerNormLinear(32, 32, device="cpu", name="layer")
        with debugging(tmp_path / folder, config, everything()):
            for _ in range(2):
                x = torch.randn(16, 32, requires_grad=True)
                with te.fp8_autocast(fp8_recipe=FP8):
                    reentrant = {"use_reentrant": "reentrant" in mode} if again else {}
                    y = (function if again else lambda f, x: f(x))(layer, x, **reentrant)
                y.square().sum().backward()
                debug_api.step()
        logs.append(logged(tmp_path / folder))
    assert logs[0] == logs[1]
    assert any("columnwise" in name for name in logs[0][1, "layer", "activation"])


def _accumulated(
    device: str, fp8: bool, step=lambda: None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the accumulated gradient, and the exact values that were added."""
    torch.manual_seed(0)
    layer = te.Linear(
        32, 32, device=device, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, name="l"
    )
    layer.weight.main_grad = torch.randn(32, 32, device=device)
    exact = []
    for _ in range(3):
        x = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
        with te.fp8_autocast(enabled=fp8, fp8_recipe=FP8):
            y = layer(x)
        y.backward(torch.ones_like(y))
        exact.append(torch.ones(32, 16, device=device).double() @ x.double())
    step()
    return layer.weight.main_grad, exact


@pytest.mark.parametrize("fp8", [False, True])
def test_accumulated_weight_gradients_stay_the_same(tmp_path: Path, device: str, fp8: bool) -> None:
    plain, exact = _accumulated(device, fp8)
    with debugging(tmp_path, everything()):
        inspected, _ = _accumulated(device, fp8, debug_api.step)
    assert inspected.equal(plain)
    found = logged(tmp_path)[0, "l", "wgrad"]
    expected = {name: reference(*exact)[name] for name in ("l1_norm", "l2_norm", "cur_amax")}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("capture_when_due", [False, True])
def test_a_captured_layer(tmp_path: Path, fp8: bool, capture_when_due: bool) -> None:
    layer = te.LayerNormLinear(
        64,
        32,
        device="cuda",
        params_dtype=torch.bfloat16,
        name="layer",
        return_layernorm_output=True,
    )
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), te.fp8_autocast(enabled=fp8, fp8_recipe=FP8):
            return layer(x)

    expected = {}
    config = everything(tensors=["activation", "weight", "output"], freq=2)
    with debugging(tmp_path, config):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            forward()
        torch.cuda.synchronize()
        for _ in range(2 if capture_when_due else 1):
            debug_api.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, normed = forward()
        first = debug_api.DEBUG_MANAGER.iteration
        for iteration in range(first, first + 4):
            parts = []
            for _ in range(2):
                x.copy_(torch.randn_like(x))
                graph.replay()
                parts.append((normed.clone(), y.clone()))
            if iteration % 2 == 0:
                expected[iteration] = parts
            debug_api.step()
    found = logged(tmp_path)
    assert {i for i, _, _ in found} == {0, *expected}
    for iteration, parts in expected.items():
        activations, outputs = zip(*parts, strict=True)
        for tensor, seen in (
            ("activation", activations),
            ("output", outputs),
            ("weight", (layer.weight,)),
        ):
            assert_statistics(found[iteration, "layer", tensor], reference(*seen))


def test_another_default_device(tmp_path: Path, device: str) -> None:
    """Tensors on the host are made there in any case."""
    layer = te.Linear(32, 32, device=device, name="layer")
    x = torch.randn(16, 32, device=device)
    with torch.device("cuda" if device == "cuda" else "meta"), debugging(tmp_path, everything()):
        for _ in range(2):
            layer(x).sum().backward()
            debug_api.step()
    for iteration in range(2):
        assert_statistics(logged(tmp_path)[iteration, "layer", "activation"], reference(x))
