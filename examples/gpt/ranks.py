"""Training on many ranks, which `torchrun` starts: their device mesh, and the part of each rank.

The mesh has three dimensions. The innermost one, of consecutive ranks, is tensor parallelism
(`--tp`), which shards layers; the next one is context parallelism (`--cp`), which shards sequences;
the outermost one is data parallelism (`--ddp`, `--fsdp`), which shards batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import transformer_engine.pytorch as te
from gpt.settings import Settings, UsageError

PLAN = {"embedding": "scatter", "head": "column"}  # see `te.parallelize`; it knows layers
T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """How ranks divide the work.

    Attributes:
        replicas: `"ddp"`: every rank has a copy of the model; `"fsdp"`: ranks shard its parameters.
        tp: number of ranks that shard every layer (tensor parallelism).
        cp: number of ranks that shard every sequence (context parallelism).
        sp: whether the ranks of `tp` also shard the tokens between layers (sequence parallelism).
    """

    replicas: str = ""
    tp: int = 1
    cp: int = 1
    sp: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1 or self.cp < 1 or (self.sp and self.tp == 1):
            raise UsageError("--tp and --cp must be above 0, and --sp needs --tp above 1")

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in (("tp", self.tp), ("cp", self.cp)) if size > 1]
        return ", ".join([*sizes, *(["sp"] if self.sp else []), *filter(None, [self.replicas])])

    @property
    def flags(self) -> str:
        """The layout as options of the command line."""
        return " ".join(f"--{part}" for part in str(self).split(", "))

    def copies(self, count: int) -> int:
        """The number of parts into which `count` ranks divide a batch.

        Raises:
            UsageError: this number of ranks cannot have the layout.
        """
        if count % (self.tp * self.cp):
            raise UsageError(f"{self.flags} needs a multiple of {self.tp * self.cp} ranks")
        copies = count // (self.tp * self.cp)
        if copies > 1 and not self.replicas:
            raise UsageError(f"torchrun has started {count} ranks; choose --ddp or --fsdp")
        return copies


@dataclass(frozen=True)
class Ranks:
    """This rank and the mesh of all ranks; the default is a single process.

    Attributes:
        layout: how ranks divide the work.
        number: global rank of this process.
        count: number of all ranks.
        mesh: mesh of all ranks with dimensions `dp`, `cp`, `tp`; None for a single process.
        data: mesh of the ranks that have different tokens: `dp` and `cp` in one dimension.
    """

    layout: Layout = Layout()
    number: int = 0
    count: int = 1
    mesh: DeviceMesh | None = None
    data: DeviceMesh | None = None

    def __str__(self) -> str:
        return f" ({self.count} ranks, {self.layout})" if self.count > 1 else ""

    @property
    def place(self) -> int:
        """The position of this rank among the ranks that have different tokens."""
        return self.number // self.layout.tp

    def check(self, settings: Settings) -> None:
        """Raise UsageError for settings that the ranks cannot divide."""
        layout, copies = self.layout, self.layout.copies(self.count)
        windows = copies * (layout.tp if layout.sp else 1)
        for flag, value, parts in (
            ("batch", settings.batch, windows),
            ("seq", settings.seq, 2 * layout.cp if layout.cp > 1 else 1),
            ("heads", settings.heads, layout.tp),
        ):
            if value % parts:
                raise UsageError(
                    f"--{flag} must be a multiple of {parts} for {self.count} ranks, got {value}"
                )
        if layout.tp > 1 and (settings.dropout or settings.fp8_weights):
            raise UsageError("--tp goes with neither --dropout nor --fp8-weights")
        if settings.model == "torch" and layout.tp * layout.cp > 1:
            raise UsageError("--model torch goes with neither --tp nor --cp")

    def own(self, windows: torch.Tensor) -> torch.Tensor:
        """This rank's windows of a batch."""
        copies = self.layout.copies(self.count)
        return windows.chunk(copies)[self.place // self.layout.cp]

    def spread(self, model: nn.Module) -> nn.Module:
        """Parallelize the model; returns the module to call, whose gradients are of all windows."""
        layout = self.layout
        if self.mesh is None or self.data is None:
            return model
        if layout.tp * layout.cp > 1:
            te.parallelize(model, self.mesh, PLAN, sequence_parallel=layout.sp)
        if layout.replicas == "fsdp":
            for layer in (*model.layers, model):  # parameters are gathered for one layer at a time
                fully_shard(layer, mesh=self.data)
        elif self.data.size() > 1:
            return DistributedDataParallel(model, process_group=self.data.get_group())
        return model

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group of a dimension of the mesh; None if it has one rank."""
        if self.mesh is None or self.mesh[name].size() == 1:
            return None
        return self.mesh[name].get_group()

    def tokens(self, windows: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of windows, `[windows, tokens]`."""
        return te.distributed.shard_sequence(windows, self.group("cp"), seq_dim=1)

    def logits(self, model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's tokens; with `tp`, only for its shard of the 256 bytes."""
        missing = -len(windows) % (self.layout.tp if self.layout.sp else 1)
        tokens = self.tokens(torch.cat([windows, *[windows[-1:]] * missing]))
        return model(tokens)[: len(windows)]

    def whole_logits(self, model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        """Logits `[windows, tokens, 256]` on every rank."""
        logits = self.logits(model, windows).float()
        logits = te.distributed.gather_sequence(logits, self.group("cp"), seq_dim=1)
        if (group := self.group("tp")) is None:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.layout.tp)]
        dist.all_gather(parts, logits.contiguous(), group=group)
        return torch.cat(parts, -1)

    def cross_entropy(self, logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of this rank's tokens of `windows`, from their `logits`."""
        flat, targets = logits.flatten(0, 1).float(), self.tokens(windows).flatten()
        if (group := self.group("tp")) is None:
            return F.cross_entropy(flat, targets)
        return te.parallel_cross_entropy(flat, targets, reduce_loss=True, dist_process_group=group)

    def finish_gradients(self, model: nn.Module, largest: float) -> None:
        """Sum gradients that sequence parallelism left partial, and clip the norm of all."""
        if self.layout.sp:
            te.all_reduce_sequence_parallel_grads(model)
        te.distributed.clip_grad_norm_(model, largest)

    def average(self, values: torch.Tensor) -> None:
        """Replace values by their means over the ranks that have different tokens."""
        if self.data is not None and self.data.size() > 1:
            dist.all_reduce(values, group=self.data.get_group())
            values /= self.data.size()

    def of_all(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        found: list[Any] = [value]
        if self.count > 1:
            found = [None] * self.count
            dist.all_gather_object(found, value)
        return found


@contextmanager
def joined(layout: Layout, device: str) -> Iterator[Ranks]:
    """Join the ranks that `torchrun` has started, over NCCL or gloo; only the first one prints.

    Raises:
        UsageError: the layout needs several ranks and `torchrun` has not started them, or it has
            started several and no layout was chosen.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if layout == Layout():
        layout.copies(count)
        yield Ranks()
        return
    if "WORLD_SIZE" not in os.environ:
        raise UsageError(
            f"{layout.flags} needs ranks: torchrun --nproc-per-node "
            f"{max(2, layout.tp * layout.cp)} examples/train_gpt.py {layout.flags}"
        )
    copies = layout.copies(count)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        sizes = (copies, layout.cp, layout.tp)
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "cp", "tp"))
        flat = (copies * layout.cp, layout.tp)
        data = init_device_mesh(device, flat, mesh_dim_names=("data", "tp"))["data"]
        with ExitStack() as silence:
            if dist.get_rank():
                nowhere = silence.enter_context(Path(os.devnull).open("w"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            yield Ranks(layout, dist.get_rank(), count, mesh, data)
    finally:
        dist.destroy_process_group()


def whole(state: T) -> T:
    """A copy of a state in which every DTensor is gathered; all ranks must call it."""
    return tree_map(lambda x: _whole(x) if isinstance(x, DTensor) else x, state)


def _whole(x: DTensor) -> torch.Tensor:
    placements = [*x.placements]
    for i in reversed(range(len(placements))):  # the innermost dimension first
        placements[i] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()


def cut_like(state: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """A state of whole tensors, sharded like the tensors of the same names in `example`."""
    return {name: cut(value, example.get(name)) for name, value in state.items()}


def cut(value: Any, example: Any) -> Any:
    """A whole tensor, sharded like `example`: every rank has all of it and keeps its shard."""
    if not (isinstance(example, DTensor) and isinstance(value, torch.Tensor) and value.dim()):
        return value
    on = value.to(example.device)
    return distribute_tensor(on, example.device_mesh, example.placements, src_data_rank=None)


class OptimizerStates:
    """Gathers the state of an optimizer for a checkpoint, and shards it again when it is loaded.

    Args:
        model: the model whose parameters are sharded.
        names: names of the optimizer's parameters, in the order of the optimizer.
        optimizer: an optimizer whose state has tensors of the size of the parameters.
    """

    def __init__(
        self, model: nn.Module, names: list[str], optimizer: torch.optim.Optimizer
    ) -> None:
        self.model, self.names, self.optimizer = model, names, optimizer

    def whole(self) -> dict[str, Any]:
        """The state as a single process would have it; all ranks must call it."""
        return self._each(te.distributed.gather_parameter)

    def load(self, state: dict[str, Any]) -> None:
        """Load a whole state; each rank keeps its shards."""
        self.optimizer.load_state_dict(self._each(te.distributed.shard_parameter, state))

    def _each(self, change: Any, state: dict[str, Any] | None = None) -> dict[str, Any]:
        state = self.optimizer.state_dict() if state is None else state
        each = {
            number: {
                key: change(self.model, self.names[number], x) if _has_parts(x) else x
                for key, x in saved.items()
            }
            for number, saved in state["state"].items()
        }
        return {**state, "state": each}


def _has_parts(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0
