"""Memory of GPUs of one host that the ranks of a group write tensors into, each other's directly.

Copy engines move the tensors and take no multiprocessor, so that GEMMs run meanwhile at their usual
speed; kernels of NCCL wait until a GEMM that fills the GPU has ended. `csrc/ops/peer_memory.h` says
how two ranks know whose turn it is.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
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

# Of each group; None where its ranks have no such memory. It belongs to the group and ends with it.
_memories: WeakKeyDictionary[Any, PeerMemory | None] = WeakKeyDictionary()


def peer_memory(group: Any, device: torch.device, count: int) -> PeerMemory | None:
    """The memory through which the ranks of a group pass tensors; None where they use collectives.

    All ranks get the same answer. The first call with larger tensors waits for the GPU.

    Args:
        group: process group.
        device: of the tensors.
        count: bytes of each.
    """
    if device.type != "cuda" or count < LEAST_BYTES:
        return None
    found = _memories.get(group)
    if found is None or found.room < count:
        if group in _memories and found is None:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        found = _memories[group] = _new_memory(group, device, count, found)
    return found


def _new_memory(
    group: Any, device: torch.device, room: int, before: PeerMemory | None
) -> PeerMemory | None:
    if before is None and not _share_host(group, device):
        return None
    torch.cuda.synchronize(device)  # nobody writes into what was there before
    dist.barrier(group)
    return PeerMemory(group, device, room)


def _share_host(group: Any, device: torch.device) -> bool:
    """Whether each rank has a GPU of its own of the same host."""
    able = symmetric_memory is not None and _C.built_with_cuda()
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), able)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    hosts, gpus, ability = zip(*everyone, strict=True)
    return all(ability) and len(set(hosts)) == 1 and len(set(gpus)) == len(gpus)


class PeerMemory:
    """Room for two tensors of each other rank, in memory of this one.

    Two, because a collective may start before what the one before has brought is read.

    Args:
        group: process group, whose ranks all make one.
        device: of this rank.
        room: bytes that a tensor may have.

    Attributes:
        rank: of this process in the group.
        ranks: of the group.
        others: the other ranks; all send to another one at a time.
    """

    def __init__(self, group: Any, device: torch.device, room: int) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.device, self.room = device, -(-room // _ALIGNMENT) * _ALIGNMENT
        self._flags = _SLOTS * (self.ranks - 1) * self.room
        total = self._flags + 2 * _SLOTS * self.ranks * _FLAG_BYTES
        self.memory = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(self.memory, group.group_name)
        views = [handle.get_buffer(r, (total,), torch.uint8) for r in range(self.ranks)]
        self._views = views  # of all ranks; they keep the memory mapped
        self._bases = [view.data_ptr() for view in views]
        words = self.memory[self._flags :].view(torch.int64)
        words.zero_()
        words[: _SLOTS * self.ranks].fill_(1)  # all may send
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.reader: Any = None  # the stream that has received last
        self.waiting: deque[Any] = deque()  # who has not received yet, in the order of sending
        self._count = 0
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def start(self, collective: Any) -> Transfer:
        """A new transfer, of a collective whose `wait` receives what comes."""
        self.waiting.append(collective)
        self._count += 1
        return Transfer(self, collective, self._count % _SLOTS)

    def place(self, sender: int, receiver: int, slot: int) -> int:
        """Where a tensor lies in memory of the receiver."""
        index = sender - (sender > receiver)
        return self.room * (_SLOTS * index + slot)

    def address(self, sender: int, receiver: int, slot: int) -> int:
        """The same as an address on this rank."""
        return self._bases[receiver] + self.place(sender, receiver, slot)

    def free(self, sender: int, receiver: int, slot: int) -> int:
        """The flag that lets a sender send."""
        return self._flag(sender, slot * self.ranks + receiver)

    def arrived(self, sender: int, receiver: int, slot: int) -> int:
        """The flag that lets a receiver read."""
        return self._flag(receiver, (_SLOTS + slot) * self.ranks + sender)

    def _flag(self, owner: int, number: int) -> int:
        return self._bases[owner] + self._flags + _FLAG_BYTES * number


class Transfer:
    """What the ranks send each other for one collective.

    Args:
        memory: through which it goes.
        collective: whose it is.
        slot: of the memory.
    """

    def __init__(self, memory: PeerMemory, collective: Any, slot: int) -> None:
        self.memory, self.collective, self.slot = memory, collective, slot
        self._left: Any = None  # what was sent has left

    def send(self, rank: int, x: torch.Tensor) -> None:
        """Let a tensor go once the current stream has made it. It stays until all is received.

        Args:
            rank: that receives.
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
        self._left = memory.stream.record_event()

    def receive(self, like: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The ranks and what they have sent, as the current stream may read it.

        A tensor is there until the next is asked for. Afterwards what this rank has sent has left.
        Collectives that were started before are waited for.

        Args:
            like: has the sizes and the dtype of what comes.
        """
        memory, own, slot = self.memory, self.memory.rank, self.slot
        while memory.waiting[0] is not self.collective:
            memory.waiting[0].wait()
        memory.waiting.popleft()
        current = torch.cuda.current_stream(memory.device)
        if memory.reader not in (None, current):
            current.wait_stream(memory.reader)
        memory.reader = current
        device, stream = memory.device.index, current.cuda_stream
        for rank in reversed(memory.others):
            _C.peer_receive(device, memory.arrived(rank, own, slot), stream)
            found = memory.memory.narrow(0, memory.place(rank, own, slot), like.nbytes)
            yield rank, found.view(like.dtype).view(like.shape)
            _C.peer_release(device, memory.free(rank, own, slot), stream)
        current.wait_event(self._left)
