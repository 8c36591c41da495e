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

from transformer_engine import _C, _env
from transformer_engine.pytorch._torch_private import symmetric_memory

# Smaller tensors arrive sooner through NCCL: the host takes longer here than for one collective.
LEAST_BYTES = 4 * 1024 * 1024
_FLAG_BYTES = 8
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
    able = symmetric_memory is not None and _env.peer_memory() and _C.built_with_cuda()
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), able)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    hosts, gpus, ability = zip(*everyone, strict=True)
    return all(ability) and len(set(hosts)) == 1 and len(set(gpus)) == len(gpus)


class PeerMemory:
    """Room for one tensor of each other rank, in memory of this one.

    Args:
        group: process group, whose ranks all make one.
        device: of this rank.
        room: bytes that a tensor may have.

    Attributes:
        rank: of this process in the group.
        ranks: of the group.
        stream: on which tensors leave.
    """

    def __init__(self, group: Any, device: torch.device, room: int) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.device, self.room = device, -(-room // _ALIGNMENT) * _ALIGNMENT
        flags = (self.ranks - 1) * self.room
        total = flags + 2 * self.ranks * _FLAG_BYTES
        self._own = symmetric_memory.empty(total, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(self._own, group.group_name)
        views = [handle.get_buffer(r, (total,), torch.uint8) for r in range(self.ranks)]
        self._views = views  # of all ranks; they keep the memory mapped
        self._bases = [view.data_ptr() for view in views]
        self._flags = flags
        words = self._own[flags:].view(torch.int64)
        words.zero_()
        words[: self.ranks].fill_(1)  # all may send
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._reader: Any = None  # the stream that has received last
        self._coming: deque[Any] = deque()  # what is to be received, in the order of sending
        torch.cuda.synchronize(device)
        dist.barrier(group)

    @property
    def others(self) -> list[int]:
        """The other ranks; all send to another one at a time."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def _place(self, sender: int, receiver: int) -> int:
        return self.room * (sender - (sender > receiver))

    def _free(self, sender: int, receiver: int) -> int:
        return self._bases[sender] + self._flags + _FLAG_BYTES * receiver

    def _arrived(self, sender: int, receiver: int) -> int:
        return self._bases[receiver] + self._flags + _FLAG_BYTES * (self.ranks + sender)

    def start(self, collective: Any) -> None:
        """What is sent from now on belongs to a collective, whose `wait` receives."""
        self._coming.append(collective)

    def send(self, rank: int, x: torch.Tensor) -> None:
        """Let a tensor go once the current stream has made it. It stays until all is received.

        Args:
            rank: that receives.
            x: at most `room` bytes; rows may have gaps between them.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        _C.peer_send(
            x,
            self._bases[rank] + self._place(self.rank, rank),
            self._free(self.rank, rank),
            self._arrived(self.rank, rank),
            self.stream.cuda_stream,
        )

    def receive(self, collective: Any, like: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The ranks and what they have sent, as the current stream may read it.

        A tensor is there until the next is asked for. Afterwards what this rank has sent has left.
        Collectives that were started before are waited for.
        """
        while self._coming[0] is not collective:
            self._coming[0].wait()
        self._coming.popleft()
        current = torch.cuda.current_stream(self.device)
        if self._reader not in (None, current):
            current.wait_stream(self._reader)
        self._reader = current
        device, stream = self.device.index, current.cuda_stream
        for rank in reversed(self.others):
            _C.peer_receive(device, self._arrived(rank, self.rank), stream)
            memory = self._own.narrow(0, self._place(rank, self.rank), like.nbytes)
            yield rank, memory.view(like.dtype).view(like.shape)
            _C.peer_release(device, self._free(rank, self.rank), stream)
        current.wait_stream(self.stream)
