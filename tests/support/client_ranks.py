"""Trains on two ranks with lightning, accelerate, and the Trainer of transformers.

Each rank trains with its half of the rows of every batch; losses are means over both ranks.
"""

import os
import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attempts import attempt
from rank_device import here
from torch import nn
from torch.distributed.tensor import DTensor

import transformer_engine.pytorch as te

HIDDEN, ROWS, STEPS = 32, 32, 4


class Block(nn.Module):
    """A LayerNormMLP with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, device=here())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), te.Linear(HIDDEN, HIDDEN, device=here()))


def rows(step: int) -> torch.Tensor:
    """Returns the rows of both ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, HIDDEN, generator=generator).to(here())


def own(step: int) -> torch.Tensor:
    return rows(step).chunk(2)[dist.get_rank()]


def loss_of(net: nn.Module, x: torch.Tensor, fp8: bool) -> torch.Tensor:
    with te.fp8_autocast(enabled=fp8):
        return (net(x).float() - 1).square().mean()


def both(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss / 2)


def check(net: nn.Module, kind: str) -> None:
    """Asserts that the trainer has wrapped the model in the way that it was asked for."""
    sharded = all(isinstance(p, DTensor) for p in net.parameters())
    replicated = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in net.modules())
    assert (sharded, replicated) == (kind == "FSDP2", kind == "DDP"), kind


def losses_of(
    net: nn.Module,
    optimizer: Any,
    fp8: bool,
    backward: Callable[[torch.Tensor], object],
    batch: Callable[[int], torch.Tensor] = own,
    mean: Callable[[torch.Tensor], float] = both,
) -> list[float]:
    """Trains for some steps and returns their losses."""
    losses = []
    for step in range(STEPS):
        loss = loss_of(net, batch(step), fp8)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


def by_hand(fp8: bool) -> list[float]:
    """Trains in one process with the rows of both ranks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    return losses_of(net, optimizer, fp8, torch.Tensor.backward, rows, torch.Tensor.item)


def lightning(kind: str, fp8: bool) -> list[float]:
    """Trains with `Fabric`, which reads the ranks from torchrun's environment variables."""
    import lightning as lightning_
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(net: Any, mesh: Any) -> Any:
        for part in (*net, net):
            fully_shard(part, mesh=mesh["data_parallel"])
        return net

    environment = TorchElasticEnvironment()
    strategy: Any
    if kind == "DDP":
        strategy = DDPStrategy(cluster_environment=environment)
    else:
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
        strategy.cluster_environment = environment
    accelerator = "gpu" if here().type == "cuda" else "cpu"
    fabric = lightning_.Fabric(accelerator=accelerator, devices=2, strategy=strategy)
    fabric.launch()
    net = fabric.setup_module(model())
    check(net, kind)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.5))
    return losses_of(net, optimizer, fp8, fabric.backward)


def sharding() -> Any:
    """Settings with which accelerate applies `fully_shard` to each block."""
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )


def shard_on_cpus(accelerator: Any, plugin: Any) -> None:
    """Makes accelerate shard on CPUs, which its code can do although it enables only GPUs."""
    from accelerate.utils import DistributedType

    if plugin is not None and here().type == "cpu":
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def accelerate(kind: str, fp8: bool) -> list[float]:
    """Trains with `Accelerator`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    plugin = sharding() if kind == "FSDP2" else None
    try:
        accelerator = Accelerator(cpu=here().type == "cpu", fsdp_plugin=plugin)
        shard_on_cpus(accelerator, plugin)
        net = model()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        check(net, kind)
        return losses_of(net, optimizer, fp8, accelerator.backward)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def trainer(fp8: bool) -> list[float]:
    """Trains with the Trainer of transformers, which applies `fully_shard`."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            loss = loss_of(self.layers, x, fp8)
            losses.append(both(loss)) if self.training else None
            return {"loss": loss}

    losses: list[float] = []
    batches = torch.stack([rows(step) for step in range(STEPS)]).cpu()
    data = [{"x": x, "labels": 0} for batch in batches for x in batch]
    fsdp = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["Block"],
        "cpu_ram_efficient_loading": False,
    }
    with TemporaryDirectory() as folder:
        try:
            settings = TrainingArguments(
                output_dir=folder,
                use_cpu=here().type == "cpu",
                per_device_train_batch_size=ROWS // 2,
                learning_rate=0.5,
                lr_scheduler_type="constant",
                optim="sgd",
                max_grad_norm=0.0,
                max_steps=STEPS,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                fsdp=True,
                fsdp_config=fsdp,
            )

            class InOrder(Trainer):
                def _get_train_sampler(self, *_: Any) -> Any:
                    return torch.utils.data.SequentialSampler(data)

            run = InOrder(model=Net(), args=settings, train_dataset=data)
            shard_on_cpus(run.accelerator, sharding())
            run.is_fsdp_enabled = True
            run.train()
            check(run.model, "FSDP2")
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    return losses


RUNS: dict[str, Callable[[bool], list[float]]] = {
    "lightning DDP": lambda fp8: lightning("DDP", fp8),
    "lightning FSDP2": lambda fp8: lightning("FSDP2", fp8),
    "accelerate DDP": lambda fp8: accelerate("DDP", fp8),
    "accelerate FSDP2": lambda fp8: accelerate("FSDP2", fp8),
    "Trainer FSDP2": trainer,
}


def _with(expected: list[float], run: Callable[[bool], list[float]], fp8: bool) -> Any:
    with patch.dict(os.environ):  # restores variables that a trainer sets
        return run(fp8), expected


def trained(rank: int, names: list[str]) -> dict[str, Any]:
    """Returns for each trainer and precision its losses and those by hand, or a traceback."""
    warnings.simplefilter("ignore")  # these libraries emit many
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    started |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {name: str(value) for name, value in started.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    found: dict[str, Any] = {}
    for fp8 in (False, True):
        expected = by_hand(fp8)
        for name in names:
            found[f"{name}, {fp8}"] = attempt(_with, expected, RUNS[name], fp8)
    return found
