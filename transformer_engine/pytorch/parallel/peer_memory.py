"""GPU memory that the ranks of one host map, to write tensors directly into each other's memory.

Copy engines move the tensors and use no multiprocessors, so that a GEMM runs at full speed at the
same time; kernels of NCCL would wait until a GEMM that fills the GPU has ended.
`csrc/ops/peer_memory.h` describes the flags by which sender and receiver synchronise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from transformer_engine import _C
from transformer_engine.pytorch.parallel.mapped_memory import MappedMemory, map_memory

# Smaller tensors arrive sooner through NCCL: the host takes longer here than for one collective.
LEAST_BYTES = 4 * 1024 * 1024
_FLAG_BYTES = 8
_SLOTS = 2
_ALIGNMENT = 512

# By group, then by whether it serves a ring; None if its ranks cannot map each other's memory. An
# entry ends with its group.
_memories: WeakKeyDictionary[Any, dict[bool, PeerMemory | None]] = WeakKeyDictionary()


def peer_memory(
    group: Any, device: torch.device, count: int, ring: bool = False
) -> PeerMemory | None:
    """The peer memory of a group; None if tensors of this size must go through NCCL.

    All ranks get the same answer. A call with larger tensors than before waits for the GPU.

    Args:
        group: process group.
        device: of the tensors.
        count: bytes of each.
        ring: a rank sends to the next one and to the previous one alone.
    """
    if device.type != "cuda" or count < LEAST_BYTES:
        return None
    memories = _memories.setdefault(group, {})
    found = memories.get(ring)
    if found is None or found.room < count:
        if ring in memories and found is None:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        torch.cuda.synchronize(device)  # until nobody uses the previous memory
        dist.barrier(group)
        room = -(-count // _ALIGNMENT) * _ALIGNMENT
        distances = _distances(dist.get_world_size(group), ring)
        mapped = map_memory(group, device, _first_flag(room, distances) + _flag_bytes(group))
        found = None if mapped is None else PeerMemory(group, mapped, room, distances)
        memories[ring] = found
    return found


def _distances(ranks: int, ring: bool) -> list[int]:
    """How far the ranks are that a rank sends to."""
    return sorted({1, ranks - 1}) if ring else [*range(1, ranks)]


def _first_flag(room: int, distances: Sequence[int]) -> int:
    """The offset behind all slots."""
    return _SLOTS * len(distances) * room


def _flag_bytes(group: Any) -> int:
    return 2 * _SLOTS * dist.get_world_size(group) * _FLAG_BYTES


class PeerMemory:
    """Memory of this rank with two slots for each rank that sends to it, which that rank writes to.

    There are two slots, because a collective may start before the tensors of the previous one have
    been read.

    Args:
        group: process group. All its ranks must call this.
        mapped: memory for slots and flags.
        room: the size of a slot in bytes.
        distances: of the ranks that a rank sends to.

    Attributes:
        rank: of this process in the group.
        ranks: the number of ranks.
        others: the other ranks in the order of sending: at any time all ranks send to different
            ones.
    """

    def __init__(
        self, group: Any, mapped: MappedMemory, room: int, distances: Sequence[int]
    ) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.memory, self.device, self.room = mapped.own, mapped.own.device, room
        self._mapped, self._distances = mapped, distances
        self._flags = _first_flag(room, distances)
        free = self.memory[self._flags :].view(torch.int64)[: _SLOTS * self.ranks]
        free.fill_(1)  # all slots are
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.reader: Any = None  # the stream that has received last
        # Transfers that have not received yet, oldest first, each with its collective.
        self.waiting: deque[tuple[Transfer, Any]] = deque()
        self._count = 0
        torch.cuda.synchronize(self.device)
        dist.barrier(group)

    def start(self, collective: Any) -> Transfer:
        """A new transfer for a collective, whose `wait` must call `Transfer.receive`."""
        self._count += 1
        transfer = Transfer(self, self._count % _SLOTS)
        self.waiting.append((transfer, collective))
        return transfer

    def place(self, sender: int, receiver: int, slot: int) -> int:
        """The offset of a slot in the memory of the receiver."""
        index = self._distances.index((receiver - sender) % self.ranks)
        return self.room * (_SLOTS * index + slot)

    def address(self, sender: int, receiver: int, slot: int) -> int:
        """The address of that slot, as this rank has mapped it."""
        return self._mapped.addresses[receiver] + self.place(sender, receiver, slot)

    def free(self, sender: int, receiver: int, slot: int) -> int:
        """The address of the flag that says that the slot is free."""
        return self._flag(sender, slot * self.ranks + receiver)

    def arrived(self, sender: int, receiver: int, slot: int) -> int:
        """The address of the flag that says that the tensor has arrived."""
        return self._flag(receiver, (_SLOTS + slot) * self.ranks + sender)

    def _flag(self, owner: int, number: int) -> int:
        return self._mapped.addresses[owner] + self._flags + _FLAG_BYTES * number


class Transfer:
    """The tensors that ranks send each other for one collective.

    Args:
        memory: peer memory.
        slot: of the memory.
    """

    def __init__(self, memory: PeerMemory, slot: int) -> None:
        self.memory, self.slot = memory, slot
        self._sent: Any = None  # event behind the last send

    def send(self, rank: int, x: torch.Tensor) -> None:
        """Send a tensor after the current stream has computed it.

        The tensor must not be freed before `receive` has ended.

        Args:
            rank: the receiver.
            x: at most `room` bytes; rows may have gaps between them.
        """
        memory, own, slot = self.memory, self.memory.rank, self.slot
        memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
        _C.peer_send(
            x,
            memory.address(own, rank, slot),
            memory.free(own, rank, slot),
            memory.arrived(own, rank, slot),
            memory.stream.cuda_stream,
        )
        self._sent = memory.stream.record_event()

    def receive(
        self, like: torch.Tensor, senders: Sequence[int] | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (rank, tensor) for each sender, on the current stream.

        A tensor is valid until the iterator advances. When it ends, the sends of this rank have
        ended, too. Collectives that were started earlier are waited for first.

        Args:
            like: a contiguous tensor with the shape and dtype of those received.
            senders: ranks; None is all others.
        """
        memory, own, slot = self.memory, self.memory.rank, self.slot
        while memory.waiting[0][0] is not self:
            memory.waiting[0][1].wait()
        memory.waiting.popleft()
        current = torch.cuda.current_stream(memory.device)
        if memory.reader not in (None, current):
            current.wait_stream(memory.reader)
        memory.reader = current
        device, stream = memory.device.index, current.cuda_stream
        for rank in reversed(memory.others) if senders is None else senders:
            _C.peer_receive(device, memory.arrived(rank, own, slot), stream)
            found = memory.memory.narrow(0, memory.place(rank, own, slot), like.nbytes)
            yield rank, found.view(like.dtype).view(like.shape)
            _C.peer_release(device, memory.free(rank, own, slot), stream)
        current.wait_event(self._sent)
