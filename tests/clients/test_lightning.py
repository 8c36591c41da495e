"""lightning's `TransformerEnginePrecision`, with `Fabric` and with `Trainer`.

On the CPU lightning opens no autocast around FP8 (it asks for that of CUDA only, with a warning).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

pytest.importorskip("lightning")
import lightning as L
from lightning.fabric.plugins.precision import TransformerEnginePrecision
from lightning.pytorch.plugins.precision import TransformerEnginePrecision as TrainerPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches.*"),
]

ACCELERATOR = {"cpu": "cpu", "cuda": "gpu"}
STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 48, bias=True),
        nn.LayerNorm((48,)),
        nn.GELU(),
        nn.Linear(48, 16, bias=False, dtype=torch.bfloat16),
    )


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(1)))


def test_fabric_trains_as_a_loop_by_hand(device: str) -> None:
    recipe = {"fp8_format": "HYBRID", "amax_history_len": 4}
    precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe)
    fabric = L.Fabric(accelerator=ACCELERATOR[device], devices=1, plugins=precision)
    net = fabric.setup_module(model())  # replaces parameters, so the optimizer comes later
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    te.gemm_report(reset=True)
    losses = []
    for batch in batches():
        x = batch.to(fabric.device)
        loss = (net(x) - x).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert te.gemm_report().total("fp8") == te.gemm_report().total() == 5 * STEPS
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert losses == by_hand(device)


def by_hand(device: str) -> list[float]:
    net = model()
    te.convert(net)
    net.to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4)
    losses = []
    for batch in batches():
        x = batch.to(device)
        with (
            torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
            te.fp8_autocast(fp8_recipe=recipe),
        ):
            out = net(x.to(torch.bfloat16))
        loss = (out.float() - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_layers_are_made_as_ours_where_asked(device: str) -> None:
    """`init_module` replaces torch's classes by ours, which then get torch's arguments."""
    precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=True)
    fabric = L.Fabric(accelerator=ACCELERATOR[device], devices=1, plugins=precision)
    with fabric.init_module():
        net = model()
        deep = nn.Linear(16, 16, device="cpu", dtype=torch.float32)
    assert [type(layer) for layer in net] == [te.Linear, te.LayerNorm, nn.GELU, te.Linear]
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in net.parameters()} == {device}
    assert (deep.weight.dtype, deep.weight.device.type) == (torch.float32, "cpu")
    net = fabric.setup(net)
    te.gemm_report(reset=True)
    fabric.backward(net(torch.randn(8, 16, device=fabric.device)).sum())
    assert te.gemm_report().total("fp8") == 5


def test_sizes_that_lightning_leaves(device: str) -> None:
    fabric = L.Fabric(accelerator=ACCELERATOR[device], devices=1, precision="transformer-engine")
    with pytest.warns(UserWarning, match="divisible by 8 and 16"):
        net = fabric.setup(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)))
    assert [type(layer) for layer in net.module] == [nn.Linear, te.Linear]
    # FP8 cannot take 24 features. That layer runs in high precision and warns once.
    with pytest.warns(UserWarning, match=r"divisible by 16 for FP8, got \(16, 24\)"):
        assert net(torch.randn(8, 16, device=fabric.device)).isfinite().all()


class Regression(L.LightningModule):
    """A model that makes its layers in the constructor, or late, in `configure_model`."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.net: nn.Module | None = None
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[0]).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(
    module: Regression, device: str, epochs: int, resume: Path | None = None, **arguments: Any
) -> Any:
    trainer = L.Trainer(
        accelerator=ACCELERATOR[device],
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    rows = torch.utils.data.TensorDataset(torch.cat(batches()))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("precision", ["transformer-engine", "transformer-engine-float16"])
def test_trainer_fits(precision: str, device: str) -> None:
    module = Regression()
    te.gemm_report(reset=True)
    fitted(module, device, 3, precision=precision)
    assert te.gemm_report().total("fp8") == te.gemm_report().total() == 3 * 5 * STEPS
    assert type(module.net[0]) is te.Linear
    assert sum(module.losses[-STEPS:]) < sum(module.losses[:STEPS])


def test_a_resumed_fit_goes_on_bit_for_bit(device: str, tmp_path: Path) -> None:
    """Layers of `configure_model` exist before lightning loads a checkpoint.

    Layers of the constructor are converted after loading. lightning would then refuse the FP8 state
    in the checkpoint.
    """

    def precision() -> TrainerPrecision:
        return TrainerPrecision(weights_dtype=torch.bfloat16, replace_layers=True)

    whole = Regression(late=True)
    fitted(whole, device, 2, plugins=precision())
    fitted(Regression(late=True), device, 1, plugins=precision()).save_checkpoint(tmp_path / "one")
    rest = Regression(late=True)
    fitted(rest, device, 2, resume=tmp_path / "one", plugins=precision())
    assert rest.losses == whole.losses[STEPS:]
