"""Training on many ranks, which `torchrun` starts: who they are, and what each of them has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from gpt.settings import UsageError

LAYOUTS = ("ddp", "fsdp")
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One rank and the others; the default is a process of its own.

    Attributes:
        layout: `"ddp"` copies the model to every rank; `"fsdp"` cuts its parameters among them.
        number: of this rank.
        count: of all.
        mesh: of all, where there are others.
    """

    layout: str = ""
    number: int = 0
    count: int = 1
    mesh: DeviceMesh | None = None

    def __str__(self) -> str:
        return f" ({self.count} ranks, {self.layout})" if self.layout else ""

    def check(self, batch: int) -> None:
        """Refuse a batch that ranks cannot share."""
        if batch % self.count:
            raise UsageError(f"--batch must be a multiple of {self.count} ranks, got {batch}")

    def own(self, windows: torch.Tensor) -> torch.Tensor:
        """This rank's windows of a batch."""
        return windows.chunk(self.count)[self.number]

    def spread(self, model: nn.Module) -> nn.Module:
        """What is called in place of the model, so that gradients are those of all windows."""
        if self.layout == "ddp":
            return DistributedDataParallel(model)
        if self.layout == "fsdp":
            for layer in (*model.layers, model):  # gathered one by one, as they run
                fully_shard(layer, mesh=self.mesh)
        return model

    def average(self, values: torch.Tensor) -> None:
        """Replace values by their means over all ranks."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count

    def of_all(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        found: list[Any] = [value]
        if self.count > 1:
            found = [None] * self.count
            dist.all_gather_object(found, value)
        return found


@contextmanager
def joined(layout: str, device: str) -> Iterator[Ranks]:
    """The ranks that `torchrun` has started, over NCCL or gloo; only the first one is heard.

    Raises:
        UsageError: nobody has started them, or nobody has said what they are for.
    """
    started = "WORLD_SIZE" in os.environ
    if not layout:
        if started and int(os.environ["WORLD_SIZE"]) > 1:
            raise UsageError("torchrun has started several ranks; choose --ddp or --fsdp")
        yield Ranks()
        return
    if not started:
        raise UsageError(
            f"--{layout} needs ranks: torchrun --nproc-per-node 2 examples/train_gpt.py --{layout}"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("data",))
        with ExitStack() as silence:
            if dist.get_rank():
                nowhere = silence.enter_context(Path(os.devnull).open("w"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            yield Ranks(layout, dist.get_rank(), dist.get_world_size(), mesh)
    finally:
        dist.destroy_process_group()


def whole(state: T) -> T:
    """A state in which every tensor is whole; all ranks call it."""
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, state)


def cut_like(state: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """A whole state, cut among ranks as tensors of the same names in an example are."""
    return {name: cut(value, example.get(name)) for name, value in state.items()}


def cut(value: Any, example: Any) -> Any:
    """A whole tensor, cut as an example is: every rank has all of it and keeps its piece."""
    if not (isinstance(example, DTensor) and isinstance(value, torch.Tensor) and value.dim()):
        return value
    on = value.to(example.device)
    return distribute_tensor(on, example.device_mesh, example.placements, src_data_rank=None)


def cut_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state of an optimizer, cut as its parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    each = {
        number: {name: cut(value, parameters[number]) for name, value in found.items()}
        for number, found in state["state"].items()
    }
    return {**state, "state": each}
