"""Peer memory as messages of gloo, so that collectives go part by part on CPUs, too."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import tensor_parallel_ranks
import torch
import torch.distributed as dist
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.chain import segments
from transformer_engine.pytorch.parallel import collectives, peer_memory
from transformer_engine.pytorch.parallel.groups import SharedByRanks
from transformer_engine.pytorch.parallel.overlap import Overlap


class PeerMessages:
    """What `PeerMemory` does, of a group of gloo."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.coming: deque[Any] = deque()
        self.sent: list[Any] = []
        self.received = 0

    def start(self, collective: Any) -> "Transfer":
        self.coming.append(collective)
        return Transfer(self, collective)


class Transfer:
    """What `peer_memory.Transfer` does."""

    def __init__(self, memory: PeerMessages, collective: Any) -> None:
        self.memory, self.collective = memory, collective

    def send(self, rank: int, x: torch.Tensor) -> None:
        group, x = self.memory.group, x.contiguous().clone()
        self.memory.sent.append((x, dist.isend(x, dist.get_global_rank(group, rank), group)))

    def receive(self, like: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        memory = self.memory
        while memory.coming[0] is not self.collective:
            memory.coming[0].wait()
        memory.coming.popleft()
        for rank in reversed(memory.others):
            part = torch.empty_like(like)
            dist.recv(part, dist.get_global_rank(memory.group, rank), memory.group)
            memory.received += 1
            yield rank, part
            part.view(torch.uint8).fill_(255)  # the next tensor comes into the same memory


def matrix_in_parts(rank: int, cases: Any) -> Any:
    """`tensor_parallel_ranks.matrix` where layers ask for overlap, and how many parts came.

    Nothing is recorded. On GPUs parts go through peer memory, however small they are.
    """
    messages = PeerMessages(dist.group.WORLD)
    patch = pytest.MonkeyPatch()
    patch.setattr(segments, "HOST_BOUND_BYTES", -1)
    patch.setattr(peer_memory, "LEAST_BYTES", 0)
    if here().type == "cpu":
        patch.setattr(collectives, "peer_memory", lambda group, device, count: messages)
    patch.setattr(tensor_parallel_ranks, "pair", _asking(tensor_parallel_ranks.pair))
    te.initialize_ub([1024, 1024], dist.get_world_size())
    try:
        return tensor_parallel_ranks.matrix(rank, cases), messages.received
    finally:
        te.destroy_ub()
        patch.undo()


def _asking(pair: Any) -> Any:
    """`pair`, whose first module asks for overlap."""

    def asking(*arguments: Any) -> Any:
        parallel, alone = pair(*arguments)
        for module in parallel.modules():
            if isinstance(module, SharedByRanks):
                module.ranks.overlap = Overlap(gather=True, scatter=True, grad_gather=True)
        return parallel, alone

    return asking
