"""Training on many ranks, which `torchrun` starts: who they are, and what each of them has.

Ranks are numbered so that those of one layer (`--tp`) are next to each other, then those of one
sequence (`--cp`), then those that have windows of their own (`--ddp`, `--fsdp`).
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

PLAN = {"embedding": "scatter", "head": "column"}  # of `te.parallelize`; layers share themselves
T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """What ranks share.

    Attributes:
        replicas: `"ddp"` copies the model to every rank; `"fsdp"` cuts its parameters among them.
        tp: ranks that share every layer.
        cp: ranks that share every sequence.
        sp: ranks of `tp` share the tokens between layers, too.
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
        """As on the command line."""
        return " ".join(f"--{part}" for part in str(self).split(", "))

    def copies(self, count: int) -> int:
        """How many parts of a batch so many ranks have.

        Raises:
            UsageError: they cannot have this layout.
        """
        if count % (self.tp * self.cp):
            raise UsageError(f"{self.flags} needs a multiple of {self.tp * self.cp} ranks")
        copies = count // (self.tp * self.cp)
        if copies > 1 and not self.replicas:
            raise UsageError(f"torchrun has started {count} ranks; choose --ddp or --fsdp")
        return copies


@dataclass(frozen=True)
class Ranks:
    """One rank and the others; the default is a process of its own.

    Attributes:
        layout: what they share.
        number: of this rank.
        count: of all.
        mesh: of all, where there are others: `dp`, `cp`, `tp`.
        data: of those with other tokens, that is `dp` and `cp`.
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
        """Of this rank among those with other tokens."""
        return self.number // self.layout.tp

    def check(self, settings: Settings) -> None:
        """Refuse a run that ranks cannot share."""
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
        """What is called in place of the model, so that gradients are those of all windows."""
        layout = self.layout
        if self.mesh is None or self.data is None:
            return model
        if layout.tp * layout.cp > 1:
            te.parallelize(model, self.mesh, PLAN, sequence_parallel=layout.sp)
        if layout.replicas == "fsdp":
            for layer in (*model.layers, model):  # gathered one by one, as they run
                fully_shard(layer, mesh=self.data)
        elif self.data.size() > 1:
            return DistributedDataParallel(model, process_group=self.data.get_group())
        return model

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks of a dimension of the mesh; None where this rank is alone there."""
        if self.mesh is None or self.mesh[name].size() == 1:
            return None
        return self.mesh[name].get_group()

    def tokens(self, windows: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of windows, `[windows, tokens]`."""
        return te.distributed.shard_sequence(windows, self.group("cp"), seq_dim=1)

    def logits(self, model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        """Those of this rank's tokens, and of its share of the bytes."""
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
        """Mean over this rank's tokens of what `logits` make of the bytes of windows."""
        flat, targets = logits.flatten(0, 1).float(), self.tokens(windows).flatten()
        if (group := self.group("tp")) is None:
            return F.cross_entropy(flat, targets)
        return te.parallel_cross_entropy(flat, targets, reduce_loss=True, dist_process_group=group)

    def finish_gradients(self, model: nn.Module, largest: float) -> None:
        """Sum what tokens of other ranks add, and clip the norm of all gradients together."""
        if self.layout.sp:
            te.all_reduce_sequence_parallel_grads(model)
        te.distributed.clip_grad_norm_(model, largest)

    def average(self, values: torch.Tensor) -> None:
        """Replace values by their means over all ranks with other tokens."""
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
    """The ranks that `torchrun` has started, over NCCL or gloo; only the first one is heard.

    Raises:
        UsageError: nobody has started them, or nobody has said what they are for.
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
    """A state in which every tensor is whole; all ranks call it."""
    return tree_map(lambda x: _whole(x) if isinstance(x, DTensor) else x, state)


def _whole(x: DTensor) -> torch.Tensor:
    placements = [*x.placements]
    for i in reversed(range(len(placements))):  # those that are next to each other first
        placements[i] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()


def cut_like(state: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """A whole state, cut among ranks as tensors of the same names in an example are."""
    return {name: cut(value, example.get(name)) for name, value in state.items()}


def cut(value: Any, example: Any) -> Any:
    """A whole tensor, cut as an example is: every rank has all of it and keeps its piece."""
    if not (isinstance(example, DTensor) and isinstance(value, torch.Tensor) and value.dim()):
        return value
    on = value.to(example.device)
    return distribute_tensor(on, example.device_mesh, example.placements, src_data_rank=None)


class OptimizerStates:
    """The state of an optimizer, whole in files and in parts on ranks.

    Args:
        model: whose parameters are cut.
        names: of the parameters that the optimizer has, in its order.
        optimizer: of any kind that keeps tensors of the size of a parameter.
    """

    def __init__(
        self, model: nn.Module, names: list[str], optimizer: torch.optim.Optimizer
    ) -> None:
        self.model, self.names, self.optimizer = model, names, optimizer

    def whole(self) -> dict[str, Any]:
        """As one process has it; all ranks call it."""
        return self._each(te.distributed.gather_parameter)

    def load(self, state: dict[str, Any]) -> None:
        """Go on with a whole state."""
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
