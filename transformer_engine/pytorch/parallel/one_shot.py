"""One-shot collectives, which pass small tensors between the ranks of one host.

Each rank writes what the others need directly into their memory, waits until they have done the
same, and combines what it finds in its own memory: see `csrc/ops/one_shot.h`. This is one operation
of `_C`, so it can be recorded with the stages around it, and takes the host no more time than any
other kernel.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from transformer_engine import _C, _env
from transformer_engine.pytorch import capture
from transformer_engine.pytorch._torch_private import group_timeout
from transformer_engine.pytorch.parallel.mapped_memory import map_memory

_CONCATENATE, _SUM, _MAX = range(3)  # te::Combine
# The bytes of a slot, for the tensors of all other ranks; larger tensors are sent in pieces.
_ROOM = {"cuda": 16 * 1024 * 1024, "cpu": 1024 * 1024}
_SLOTS = 2
_SUMMED = (torch.float32, torch.float16, torch.bfloat16)

# By group; None if the ranks cannot map each other's memory. An entry is dropped with its group.
_known: WeakKeyDictionary[Any, OneShot | None] = WeakKeyDictionary()


class OneShot:
    """One-shot collectives of a group, for tensors on one device.

    All ranks must call the same collectives in the same order. Calls on different streams run one
    after the other.

    Attributes:
        tensors: persistent tensors that calls read and write beside their arguments.
    """

    def __init__(self, group: Any, device: torch.device, memory: Any) -> None:
        self.device, self.ranks = device, dist.get_world_size(group)
        timeout = int(group_timeout(group).total_seconds() * 1000)
        fields = [dist.get_rank(group), timeout, memory.lock_file, 0, *memory.addresses]
        self.tensors = (memory.own, torch.tensor(fields, dtype=torch.int64, device="cpu"))
        self._held = memory

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors `[rows, ...]` of all ranks, as `[ranks * rows, ...]`."""
        out = x.new_empty((self.ranks * x.shape[0], *x.shape[1:]))
        _C.one_shot(x, out, *self.tensors, False, _CONCATENATE)
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Part r of the first axis goes to rank r; part r of the result comes from rank r."""
        out = torch.empty_like(x)
        _C.one_shot(x, out, *self.tensors, True, _CONCATENATE)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's `[rows / ranks, ...]` of the sum of `[rows, ...]`, in the order of ranks."""
        out = x.new_empty((x.shape[0] // self.ranks, *x.shape[1:]))
        _C.one_shot(x, out, *self.tensors, True, _SUM)
        return out

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """The sum or the maximum (`op` is `sum` or `max`), in the memory of `x`."""
        _C.one_shot(x, x, *self.tensors, False, _SUM if op == "sum" else _MAX)
        return x


def one_shot_of(group: Any, device: torch.device) -> OneShot | None:
    """The one-shot collectives of a group; None if there are none for tensors on this device.

    The result is the same on all ranks. The first call of a group maps memory, so all ranks must
    make it.
    """
    group = group or dist.group.WORLD
    if group not in _known:
        if capture.is_capturing():
            return None
        _known[group] = _new(group, device)
    found = _known[group]
    # While a call is recorded, tensors are stand-ins on the CPU.
    if found is None or not (found.device == device or _C.is_recording()):
        return None
    return found


def _new(group: Any, device: torch.device) -> OneShot | None:
    ranks = dist.get_world_size(group)
    if not 1 < ranks <= _C.one_shot_most_ranks() or device.type not in _ROOM:
        return None
    if dist.get_backend(group) == "fake" or not _env.one_shot_collectives():
        return None
    size = _C.one_shot_header(ranks) + _SLOTS * _ROOM[device.type]
    memory = map_memory(group, device, size)
    return None if memory is None else OneShot(group, device, memory)


def one_shot_tensors(group: Any) -> tuple[torch.Tensor, ...]:
    """`OneShot.tensors` of a group; empty before `one_shot_of` was called."""
    found = _known.get(group or dist.group.WORLD)
    return () if found is None else found.tensors


def can_sum(x: torch.Tensor) -> bool:
    """Whether one-shot collectives can sum this dtype."""
    return x.dtype in _SUMMED
