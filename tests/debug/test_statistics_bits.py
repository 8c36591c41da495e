"""Statistics change no bit of a training run."""

from pathlib import Path

import pytest
import torch
from debug_session import SIX, debugging, logged, section
from precisions import RECIPES, scope

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te

MOMENTS = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
CASTS = ["underflows%", "overflows%", "mse", "scale_inv_min", "fp8_current_scaling_underflows%"]
CASTS += ["mse_columnwise", "fp8_block_scaling_mse", "fp8_block_scaling_mse_columnwise"]
CASTS += ["mxfp8_mse"]
STEPS, MICROBATCHES = 3, 2


def train(device: str, recipe: str, dropout: float, step=lambda: None) -> list[bytes]:
    """Losses and final weights of a small run, as bytes. Without dropout GEMMs add residuals."""
    torch.manual_seed(1)
    model = te.TransformerLayer(
        64,
        128,
        2,
        hidden_dropout=dropout,
        attention_dropout=0.0,
        device=device,
        params_dtype=torch.bfloat16,
        attn_input_format="bshd",
        name="layer",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(STEPS):
        for index in range(MICROBATCHES):
            x = torch.randn(2, 16, 64, device=device, dtype=torch.bfloat16)
            with scope(recipe):
                y = model(x, is_first_microbatch=index == 0)
            loss = y.float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        step()
    tensors = [*seen, *(p.detach() for p in model.parameters())]
    return [t.float().cpu().numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_with_every_statistic_is_the_same_run(
    tmp_path: Path, device: str, recipe: str, dropout: float
) -> None:
    plain = train(device, recipe, dropout)
    sections = [section("LogTensorStats", tensors=SIX, stats=MOMENTS)]
    if recipe != "high precision":
        sections.append(section("LogFp8TensorStats", tensors=SIX[:3], stats=CASTS))
    with debugging(tmp_path, *sections):
        inspected = train(device, recipe, dropout, debug_api.step)
    assert inspected == plain
    assert len({(i, layer) for i, layer, _ in logged(tmp_path)}) == STEPS * 4


@pytest.mark.parametrize("layers", ["fc1", "fc2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_of_one_of_two_products(
    tmp_path: Path, device: str, recipe: str, layers: str
) -> None:
    """The activation between two GEMMs has two readers: an inspected layer, and another one."""
    plain = train(device, recipe, 0.1)
    with debugging(tmp_path, section("LogTensorStats", layers, tensors=SIX, stats=MOMENTS)):
        inspected = train(device, recipe, 0.1, debug_api.step)
    assert inspected == plain
    assert len({layer for _, layer, _ in logged(tmp_path)}) == 1


@pytest.mark.parametrize(
    "feature",
    [{"LogTensorStats": {"stats": "max"}}, {"DumpTensors": {"high_precision_tensor": True}}],
)
@pytest.mark.parametrize("mode", ["plain", "autocast", "fp8"])
@pytest.mark.parametrize("keys", [{"freq": 3}, {"freq": 2}, {"start_step": 1}])
def test_a_step_within_micro_batches(
    tmp_path: Path, device: str, feature: dict, mode: str, keys: dict
) -> None:
    """Micro-batches use the weights of their step and its first cast, inspected or not."""

    def losses(step=lambda: None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = te.MultiheadAttention(32, 2, attention_dropout=0.0, device=device, name="layer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            for first in (True, False):
                x = torch.randn(8, 2, 32, device=device)
                with (
                    torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"),
                    te.fp8_autocast(enabled=mode == "fp8"),
                ):
                    loss = model(x, is_first_microbatch=first).float().square().sum()
                loss.backward()
                found.append(loss.detach())
                step()
            optimizer.step()
            optimizer.zero_grad()
        return found

    plain = losses()
    ((name, body),) = feature.items()
    with debugging(tmp_path, section(name, tensors=["weight"], **keys, **body)):
        inspected = losses(debug_api.step)
    assert inspected == plain
