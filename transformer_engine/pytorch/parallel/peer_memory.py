"""GPU memory that the ranks of one host map, to write tensors directly into each other's memory.

Copy engines move the tensors and use no multiprocessors, so that a GEMM runs at full speed at the
same time; kernels of NCCL would wait until a GEMM that fills the GPU has ended.
`csrc/ops/peer_memory.h` describes the flags by which sender and receiver synchronise.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from transformer_engine import _C
from transformer_engine.pytorch._torch_private import symmetric_memory

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
        if found is None and not _share_host(group, device):
            memories[ring] = None
            return None
        torch.cuda.synchronize(device)  # until nobody uses the previous memory
        dist.barrier(group)
        found = memories[ring] = PeerMemory(group, device, count, ring)
    return found


def _share_host(group: Any, device: torch.device) -> bool:
    """Whether all ranks are on one host, each with its own GPU."""
    able = symmetric_memory is not None and _C.built_with_cuda()
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), able)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    hosts, gpus, ability = zip(*everyone, strict=True)
    return all(ability) and len(set(hosts)) == 1 and len(set(gpus)) == len(gpus)


class PeerMemory:
    """Memory of this rank with two slots for each rank that sends to it, which that rank writes to.

    There are two slots, because a collective may start before the tensors of the previous one have
    been read.

    Args:
        group: process group. All its ranks must call this.
        device: of this rank.
        room: the size of a slot in bytes, rounded up.
        ring: the next rank and the previous one send to this rank; else all others do.

    Attributes:
        rank: of this process in the group.
        ranks: the number of ranks.
        others: the other ranks in the order of sending: at any time all ranks send to different
            ones.
    """

    def __init__(self, group: Any, device: torch.device, room: int, ring: bool = False) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.device, self.room = device, -(-room // _ALIGNMENT) * _ALIGNMENT
        self._distances = sorted({1, self.ranks - 1}) if ring else [*range(1, self.ranks)]
        self._flags = _SLOTS * len(self._distances) * self.room
        total = self._flags + 2 * _SLOTS * self.ranks * _FLAG_BYTES
        self.memory = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(self.memory, group.group_name)
        views = [handle.get_buffer(r, (total,), torch.uint8) for r in range(self.ranks)]
        self._views = views  # of all ranks; holding them keeps the memory mapped
        self._bases = [view.data_ptr() for view in views]
        words = self.memory[self._flags :].view(torch.int64)
        words.zero_()
        words[: _SLOTS * self.ranks].fill_(1)  # all slots are free
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.reader: Any = None  # the stream that has received last
        # Transfers that have not received yet, oldest first, each with its collective.
        self.waiting: deque[tuple[Transfer, Any]] = deque()
        self._count = 0
        torch.cuda.synchronize(device)
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
        return self._bases[receiver] + self.place(sender, receiver, slot)

    def free(self, sender: int, receiver: int, slot: int) -> int:
        """The address of the flag that says that the slot is free."""
        return self._flag(sender, slot * self.ranks + receiver)

    def arrived(self, sender: int, receiver: int, slot: int) -> int:
        """The address of the flag that says that the tensor has arrived."""
        return self._flag(receiver, (_SLOTS + slot) * self.ranks + sender)

    def _flag(self, owner: int, number: int) -> int:
        return self._bases[owner] + self._flags + _FLAG_BYTES * number


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
