"""accelerate with `mixed_precision="fp8"` and this package as its backend."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    FP8RecipeKwargs,
    TERecipeKwargs,
    has_transformer_engine_layers,
    is_transformer_engine_available,
)

STEPS = 4


@pytest.fixture
def accelerator_of(device: str) -> Iterator[Callable[..., Accelerator]]:
    """Makes an `Accelerator` for FP8 on the device."""

    def make(**arguments: object) -> Accelerator:
        return Accelerator(cpu=device == "cpu", **arguments)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)
    )


def loader(rows: int = 2) -> torch.utils.data.DataLoader:
    x = torch.randn(STEPS * rows, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(x, batch_size=rows)


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x).pow(2).mean()


def trained(accelerator: Accelerator, net: nn.Module) -> tuple[nn.Module, list[float]]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    net, optimizer, scheduler, batches = accelerator.prepare(net, optimizer, scheduler, loader())
    losses = []
    for x in batches:
        loss = loss_of(net, x)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return net, losses


def by_hand(device: str, recipe: DelayedScaling) -> list[float]:
    """Runs the same steps with `te.convert` and the contexts that accelerate opens."""
    net = model()
    te.convert(net, fuse=False)
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for x in loader():
        batch = x.to(device)
        with torch.autocast(device, torch.bfloat16), te.fp8_autocast(fp8_recipe=recipe):
            out = net(batch)
        loss = (out.float() - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_trains_as_a_loop_by_hand(device: str, accelerator_of: Callable[..., Accelerator]) -> None:
    handler = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=4, amax_compute_algo="max")
    accelerator = accelerator_of(mixed_precision="fp8", kwargs_handlers=[handler])
    te.gemm_report(reset=True)
    net, losses = trained(accelerator, model())
    report = te.gemm_report()
    assert has_transformer_engine_layers(net)
    assert report.total("fp8") == report.total() == 5 * STEPS
    assert {p.device.type for p in net.parameters()} == {device}
    assert losses == by_hand(device, DelayedScaling(amax_history_len=4))
    with torch.no_grad():
        net.eval()
        te.gemm_report(reset=True)
        net(torch.zeros(2, 16, device=device))
    assert te.gemm_report().total("fp8") == 0  # no autocast for evaluation by default


def test_chosen_by_environment(
    accelerator_of: Callable[..., Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that `accelerate launch` sets from `fp8_config: {backend: TE, ...}`."""
    for name, value in {
        "MIXED_PRECISION": "fp8",
        "FP8_BACKEND": "TE",
        "FP8_FORMAT": "E4M3",
        "FP8_USE_AUTOCAST_DURING_EVAL": "true",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    accelerator = accelerator_of()
    te.gemm_report(reset=True)
    net, losses = trained(accelerator, model())
    assert losses[0] > 0 and te.gemm_report().total("fp8") == 5 * STEPS
    net.eval()
    net(torch.zeros(2, 16, device=accelerator.device))
    assert te.gemm_report().total("fp8") == 5 * STEPS + 2


def test_models_with_layers_of_other_kinds(
    device: str, accelerator_of: Callable[..., Accelerator]
) -> None:
    """A norm without bias, a Linear without bias, and a Linear of sizes that FP8 cannot take."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(16, bias=False), nn.Linear(16, 32, bias=False))
    net = nn.Sequential(net, nn.Sequential(nn.Linear(32, 17), nn.Linear(17, 16)))
    net, losses = trained(accelerator_of(mixed_precision="fp8"), net)
    kinds = [type(layer) for layer in net.modules() if not isinstance(layer, nn.Sequential)]
    assert kinds == [te.LayerNorm, te.Linear, nn.Linear, nn.Linear]
    assert all(math.isfinite(loss) for loss in losses)


def test_models_converted_before(device: str, accelerator_of: Callable[..., Accelerator]) -> None:
    """accelerate converts no layer after the odd Linear; `te.convert` does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 17), nn.GELU(), nn.Linear(17, 32), nn.Linear(32, 16))
    te.convert(net)
    net, losses = trained(accelerator_of(mixed_precision="fp8"), net)
    assert [type(layer) for layer in net] == [nn.Linear, nn.GELU, nn.Linear, te.Linear]
    assert all(math.isfinite(loss) for loss in losses)


def test_state_is_saved_and_resumed(
    device: str, accelerator_of: Callable[..., Accelerator], tmp_path: Path
) -> None:
    """A run with restored weights, optimizer and FP8 scales gives the same bits."""
    accelerator = accelerator_of(mixed_precision="fp8")
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    batches = [x.to(accelerator.device) for x in loader(16)]

    def steps(some: list[torch.Tensor]) -> list[float]:
        losses = []
        for x in some:
            loss = loss_of(net, x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps(batches[:2])
    accelerator.save_state(str(tmp_path))
    assert any(path.suffix == ".safetensors" for path in tmp_path.iterdir())
    expected = steps(batches[2:])
    steps(batches)  # move on from the saved state
    accelerator.load_state(str(tmp_path))
    assert steps(batches[2:]) == expected


def test_mxfp8_is_refused_with_the_reason(accelerator_of: Callable[..., Accelerator]) -> None:
    handler = TERecipeKwargs(use_mxfp8_block_scaling=True)
    accelerator = accelerator_of(mixed_precision="fp8", kwargs_handlers=[handler])
    with pytest.raises(ValueError, match=r"MXFP8 block scaling is not available: .*10\.0"):
        trained(accelerator, model())


@pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:DelayedScaling. ignoring unknown keyword:UserWarning")
def test_older_recipe_handler(accelerator_of: Callable[..., Accelerator]) -> None:
    handler = FP8RecipeKwargs(backend="te", amax_history_len=16)
    accelerator = accelerator_of(mixed_precision="fp8", kwargs_handlers=[handler])
    te.gemm_report(reset=True)
    trained(accelerator, model())
    assert te.gemm_report().total("fp8") == 5 * STEPS


def test_accelerate_alone_imports_nothing_of_ours() -> None:
    assert is_transformer_engine_available()
    code = "import sys, accelerate; sys.exit('transformer_engine' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
