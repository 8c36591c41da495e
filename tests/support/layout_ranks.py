"""Checkpoints of distributed/test_layouts that a run with another layout resumes from."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_device import here
from replica_reference import RECIPES, alone, make, one_process, one_rank
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te

# (layout, steps): each resumes from the checkpoint of the one before it.
LAYOUTS = (
    ("one process", range(2)),
    ("DistributedDataParallel", range(2, 3)),
    ("fully_shard", range(3, 4)),
    ("one process", range(4, 6)),
)
# With FP8 weights, all recipes. Without, bf16 and delayed are enough on CPUs: the other recipes
# save no scaling state, so their checkpoints are like those of bf16.
PRECISIONS = [
    (one, fp8)
    for one in RECIPES
    for fp8 in (False, True)
    if (one != "bf16" if fp8 else one in ("bf16", "delayed") or torch.cuda.is_available())
]


class _Trained:
    """A layer under a layout, with its optimizer.

    Layers with other seeds have other weights until they load a checkpoint.
    """

    def __init__(self, layout: str, precision: str, fp8_weights: bool, seed: int) -> None:
        self.layout, self.recipe = layout, RECIPES[precision]
        with te.quantized_model_init(fp8_weights, recipe=self.recipe):
            self.model = self.wrapped = make("TransformerLayer", seed)
        if layout == "DistributedDataParallel":
            self.wrapped = DistributedDataParallel(self.model)
        elif layout == "fully_shard":
            fully_shard(self.model, mesh=init_device_mesh(here().type, (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, rank: int, group: Any, steps: range) -> list[float]:
        if self.layout == "one process":
            return one_process(self.model, self.recipe, group, self.optimizer, steps)
        return one_rank(self.wrapped, self.recipe, rank, self.optimizer, steps)

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def _moved(precision: str, fp8_weights: bool, rank: int, group: Any, folder: Path) -> Any:
    """Returns the losses of a run that changes its layout, and of a run that does not."""
    losses: list[float] = []
    for number, (layout, steps) in enumerate(LAYOUTS):
        trained = _Trained(layout, precision, fp8_weights, seed=number + 1)
        if number:
            trained.load(folder / str(number - 1))
        losses += trained.train(rank, group, steps)
        trained.save(folder / str(number))
    unmoved = _Trained("one process", precision, fp8_weights, seed=1)
    return losses, unmoved.train(rank, group, range(6))


def layouts(rank: int) -> dict[str, Any]:
    """Returns the losses of every case, by name."""
    group, found, folder = alone(rank), {}, [""]
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for precision, fp8_weights in PRECISIONS:
            name = f"{precision}{', FP8 weights' if fp8_weights else ''}"
            found[name] = _moved(precision, fp8_weights, rank, group, Path(folder[0]) / name)
        dist.barrier()  # rank 0 deletes the folder
    return found
