"""Memory that the ranks of one host map, to write tensors directly into each other's memory.

On GPUs copy engines move the tensors and use no multiprocessors, so that a GEMM runs at full speed
at the same time; kernels of NCCL would wait until a GEMM that fills the GPU has ended.
`csrc/ops/peer_memory.h` describes the flags by which sender and receiver synchronise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from transformer_engine import _C
from transformer_engine.pytorch import capture
from transformer_engine.pytorch._torch_private import group_timeout
from transformer_engine.pytorch.parallel.mapped_memory import MappedMemory, map_memory

# On CPUs the host does all the work, so nothing would overlap.
DEVICES = {"cuda"}
# Smaller tensors arrive sooner by a collective, which takes less time on the host.
LEAST_BYTES = 4 * 1024 * 1024
_MOST_SLOTS = 4  # te::kRingSlots
ALL_OTHERS = -1  # te::kAllOthers
_ALIGNMENT = 512

# Memories by group, then by `ring`; None if the ranks cannot map each other's memory. The entry of
# a group is dropped with the group.
_memories: WeakKeyDictionary[Any, dict[bool, PeerMemory | None]] = WeakKeyDictionary()


def peer_memory(
    group: Any, device: torch.device, count: int, ring: bool = False
) -> PeerMemory | None:
    """The peer memory of a group; None if tensors of this size must be sent in another way.

    The result is the same on all ranks. For tensors that are larger than before, the call waits for
    the GPU and allocates memory, but not while a call is recorded or captured into a CUDA graph.
    Each tensor has `count` bytes. In a `ring` a rank sends only to the next rank and to the
    previous one.

    Raises:
        NotRecordedError: while recording, if the call needs new memory.
    """
    group = group or dist.group.WORLD
    memories = _memories.setdefault(group, {})
    found = memories.get(ring)
    if count < LEAST_BYTES:
        return None
    if _C.is_recording():  # with stand-ins, which are on the CPU
        if ring not in memories or (found is not None and found.room < count):
            raise capture.NotRecordedError("a collective that needs more peer memory")
        return found
    if device.type not in DEVICES:
        if device.type == "cpu":  # meta tensors say nothing about the device of later calls
            memories[ring] = None
        return None
    if found is None or found.room < count:
        if ring in memories and found is None:
            return None
        if capture.is_capturing():
            return None
        _synchronize(device)  # until nobody uses the previous memory
        dist.barrier(group)
        room = -(-count // _ALIGNMENT) * _ALIGNMENT
        size = _C.peer_memory_bytes(dist.get_world_size(group), room, ring)
        mapped = map_memory(group, device, size)
        found = None if mapped is None else PeerMemory(group, mapped, room, ring)
        memories[ring] = found
    return found


def peer_tensors(group: Any, ring: bool = False) -> tuple[torch.Tensor, ...]:
    """`PeerMemory.tensors` of a group; empty before `peer_memory` was called."""
    found = _memories.get(group or dist.group.WORLD, {}).get(ring)
    return () if found is None else found.tensors


def device_in_ring(x: torch.Tensor, group: Any) -> torch.device:
    """The device of a tensor; for a stand-in, that of the ring's memory."""
    if not _C.is_recording():
        return x.device
    memory, _ = peer_tensors(group, ring=True)
    return memory.device


def drop_recorded() -> None:
    """Drop the transfers of a recording that was aborted."""
    for found in [one for memories in _memories.values() for one in memories.values()]:
        if found is not None:
            left = [pair for pair in found.waiting if not pair[0].recorded]
            found.waiting = deque(left)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeerMemory:
    """Memory of this rank, with slots to which other ranks write.

    There are two slots, because a collective may start before the tensors of the previous one have
    been read. A ring of more than two ranks has four: keys and values are read while the next
    ones arrive.

    Args:
        group: process group. All its ranks must call this.
        mapped: memory for slots and flags.
        room: the size of a slot in bytes.
        ring: see `peer_memory`.

    Attributes:
        rank: the rank of this process in the group.
        ranks: the number of ranks.
        others: the other ranks, in the order in which this rank sends: at any time all ranks send
            to different receivers.
        slots: the number of slots of each sender.
        tensors: persistent tensors that calls read and write beside their arguments.
    """

    def __init__(self, group: Any, mapped: MappedMemory, room: int, ring: bool) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.room = room
        device = mapped.own.device
        timeout = int(group_timeout(group).total_seconds() * 1000)
        held: list[Any] = [mapped]
        self.slots = _C.peer_slots(self.ranks, ring)
        handles = [0] * (2 + _MOST_SLOTS)
        if device.type == "cuda":
            stream = torch.cuda.Stream(device, priority=-1)  # on which sends run
            events = [torch.cuda.Event() for _ in range(1 + _MOST_SLOTS)]
            for event in events:
                event.record(stream)  # torch creates the CUDA event at the first record
            handles = [stream.cuda_stream, *[event.cuda_event for event in events]]
            held += [stream, events]
        # te::PeerField
        fields = [self.rank, timeout, mapped.lock_file, 0, *handles, room, ring, *mapped.addresses]
        self.tensors = (mapped.own, torch.tensor(fields, dtype=torch.int64, device="cpu"))
        # Recordings hold only the tensors, and may outlive this object if later calls need more.
        self.tensors[1].held = held  # type: ignore[attr-defined]
        flags = mapped.own[-2 * self.slots * self.ranks * 8 :].view(torch.int64)
        flags[: self.slots * self.ranks].fill_(1)  # all slots are free
        # Transfers that have not received yet, oldest first, each with its collective.
        self.waiting: deque[tuple[Transfer, Any]] = deque()
        _synchronize(device)
        dist.barrier(group)

    def start(self, collective: Any, slot: int) -> Transfer:
        """A new transfer for a collective, whose `wait` must call `Transfer.receive`.

        The slot is the same on all ranks. If an earlier transfer still waits in it, that one is
        received now.
        """
        for transfer, started in [*self.waiting]:
            if transfer.slot == slot:
                started.wait()
        transfer = Transfer(self, slot)
        self.waiting.append((transfer, collective))
        return transfer

    def received(self, sender: int, slot: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor in a slot of this rank."""
        return self._bytes(sender, slot, like.nbytes).view(like.dtype).view(like.shape)

    def across(self, slot: int, shape: tuple[int, int]) -> torch.Tensor | None:
        """A uint8 tensor over a slot, of which each rank writes a part; None if it does not fit."""
        count = math.prod(shape)
        if count > self.room * len(self.others):
            return None
        return self._bytes(ALL_OTHERS, slot, count).view(shape)

    def _bytes(self, sender: int, slot: int, count: int) -> torch.Tensor:
        own, group = self.tensors
        return own.narrow(0, _C.peer_slot_offset(group, sender, slot), count)


class Transfer:
    """The tensors that ranks send each other for one collective, in a slot of peer memory."""

    def __init__(self, memory: PeerMemory, slot: int) -> None:
        self.memory, self.slot = memory, slot
        self.recorded = _C.is_recording()
        self._last: torch.Tensor | None = None  # the tensor that was sent last

    def send(self, rank: int, x: torch.Tensor) -> None:
        """Send a tensor after the current stream has computed it.

        The tensor must not be freed before `receive` has ended. Tensors that are sent by one
        transfer must share memory; otherwise `finish` must be called with each of them.

        Args:
            rank: the receiver; with `ALL_OTHERS` all other ranks receive it, one after the other.
            x: at most `room` bytes; rows may have gaps between them.
        """
        _C.peer_send(x, *self.memory.tensors, rank, self.slot)
        self._last = x

    def spread(self, x: torch.Tensor) -> None:
        """Send this rank's part of a tensor of `across` to the same place at all others."""
        _C.peer_spread(x, *self.memory.tensors, self.slot)
        self._last = x

    def receive_all(self) -> None:
        """Wait for the tensors of all others, valid until `release_all`; see `receive`."""
        self._come_next()
        _C.peer_receive(*self.memory.tensors, ALL_OTHERS, self.slot)

    def release_all(self) -> None:
        """Let others write to the slot again, and wait for the end of this rank's sends."""
        self.release(ALL_OTHERS)
        self._finish()

    def receive(
        self, like: torch.Tensor, at_once: bool = False
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (rank, tensor) for each other rank, on the current stream.

        Tensors are valid until the iterator ends; by then the sends of this rank have ended, too.
        Collectives that were started earlier are waited for first.

        Args:
            like: a contiguous tensor with the shape and dtype of those received.
            at_once: wait for all tensors before the first. If they have arrived, this takes less
                time than waiting for each.
        """
        memory, slot = self.memory, self.slot
        if at_once:
            self.receive_all()
        else:
            self._come_next()
        for rank in reversed(memory.others):
            if not at_once:
                _C.peer_receive(*memory.tensors, rank, slot)
            yield rank, memory.received(rank, slot, like)
        self.release_all()

    def borrow(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        """The tensor from a rank, in peer memory, valid until `release`; waits for own sends, too.

        For `like` see `receive`.
        """
        memory, slot = self.memory, self.slot
        self._come_next()
        _C.peer_receive(*memory.tensors, sender, slot)
        self._finish()
        return memory.received(sender, slot, like)

    def start_copy(self, sender: int, out: torch.Tensor) -> None:
        """Start a copy of the borrowed tensor on another stream; `finish` waits for the copy."""
        _C.peer_copy(out, *self.memory.tensors, sender, self.slot)

    def release(self, sender: int) -> None:
        """Let a sender, or all, write to the slot again once the current stream is this far."""
        _C.peer_release(*self.memory.tensors, sender, self.slot)

    def receive_sum(self, own: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The sum of `own` and of the tensors of all others, added in fp32 and rounded once.

        Like `receive`, it waits for collectives that were started earlier, and for its own sends.
        `own` is contiguous, with the shape and dtype of those received; `bias`, `[cols]` of its
        dtype, is added to the sum.
        """
        self._come_next()
        out = torch.empty_like(own)
        _C.peer_sum(own, bias, out, *self.memory.tensors, self.slot)
        self._finish()
        return out

    def _come_next(self) -> None:
        waiting = self.memory.waiting
        while waiting[0][0] is not self:
            waiting[0][1].wait()
        waiting.popleft()

    def finish(self, x: torch.Tensor) -> None:
        """Wait for this rank's last send or copy, so that the memory of `x` may be used again."""
        _C.peer_finish(x, *self.memory.tensors, self.slot)

    def _finish(self) -> None:
        assert self._last is not None
        self.finish(self._last)
        self._last = None
