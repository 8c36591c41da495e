"""Peer memory as messages of gloo, so that collectives go part by part on CPUs, too."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import tensor_parallel_ranks
import torch
import torch.distributed as dist

from transformer_engine.pytorch.chain import segments
from transformer_engine.pytorch.parallel import collectives


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
    """`tensor_parallel_ranks.matrix`, and how many parts came; nothing is recorded."""
    messages = PeerMessages(dist.group.WORLD)
    before = segments.HOST_BOUND_BYTES, collectives.peer_memory
    segments.HOST_BOUND_BYTES = -1
    collectives.peer_memory = lambda group, device, count: messages  # type: ignore[assignment]
    try:
        return tensor_parallel_ranks.matrix(rank, cases), messages.received
    finally:
        segments.HOST_BOUND_BYTES, collectives.peer_memory = before
