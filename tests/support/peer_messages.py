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

    def start(self, collective: Any) -> None:
        self.coming.append(collective)

    def send(self, rank: int, x: torch.Tensor) -> None:
        x = x.contiguous().clone()
        self.sent.append((x, dist.isend(x, dist.get_global_rank(self.group, rank), self.group)))

    def receive(self, collective: Any, like: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        while self.coming[0] is not collective:
            self.coming[0].wait()
        self.coming.popleft()
        for rank in reversed(self.others):
            part = torch.empty_like(like)
            dist.recv(part, dist.get_global_rank(self.group, rank), self.group)
            self.received += 1
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
