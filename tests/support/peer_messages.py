"""Peer memory as messages of gloo, so that collectives go part by part on CPUs, too."""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import tensor_parallel_ranks
import torch
import torch.distributed as dist
from context_cases import outcomes
from rank_device import here
from sizes import as_large_inputs

import transformer_engine.pytorch as te
from transformer_engine.pytorch.parallel import collectives, exchange, peer_memory
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
        transfer = Transfer(self)
        self.coming.append((transfer, collective))
        return transfer


class Transfer:
    """What `peer_memory.Transfer` does."""

    def __init__(self, memory: PeerMessages) -> None:
        self.memory = memory

    def send(self, rank: int, x: torch.Tensor) -> None:
        group, x = self.memory.group, x.contiguous().clone()
        work = dist.isend(x, dist.get_global_rank(group, rank), group)
        sent = [one for one in self.memory.sent if not one[1].is_completed()]
        self.memory.sent = [*sent, (x, work)]

    def receive(
        self, like: torch.Tensor, senders: Sequence[int] | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        memory = self.memory
        while memory.coming[0][0] is not self:
            memory.coming[0][1].wait()
        memory.coming.popleft()
        for rank in reversed(memory.others) if senders is None else senders:
            part = torch.empty_like(like)
            dist.recv(part, dist.get_global_rank(memory.group, rank), memory.group)
            memory.received += 1
            yield rank, part
            part.view(torch.uint8).fill_(255)  # the next tensor comes into the same memory


@contextmanager
def in_parts() -> Iterator[PeerMessages]:
    """Inside, layers that ask for overlap pass tensors part by part, however small they are.

    Calls are as those with large inputs are. On GPUs parts go through peer memory.
    """
    messages = PeerMessages(dist.group.WORLD)
    patch = pytest.MonkeyPatch()
    patch.setattr(peer_memory, "LEAST_BYTES", 0)
    if here().type == "cpu":
        patch.setattr(collectives, "peer_memory", lambda group, device, count: messages)
    patch.setattr(tensor_parallel_ranks, "pair", _asking(tensor_parallel_ranks.pair))
    te.initialize_ub([1024, 1024], dist.get_world_size())
    try:
        with as_large_inputs():
            yield messages
        dist.barrier()  # nobody leaves while another still receives
    finally:
        te.destroy_ub()
        patch.undo()


def matrix_in_parts(rank: int, cases: Any) -> Any:
    """`tensor_parallel_ranks.matrix` in parts, and how many parts came."""
    with in_parts() as messages:
        return tensor_parallel_ranks.matrix(rank, cases), messages.received


def tensors_left(rank: int) -> int:
    """How many tensors some steps in parts leave behind where nobody collects garbage."""
    with in_parts() as messages:
        shared = tensor_parallel_ranks.MODULES["layer"]
        layer, _ = tensor_parallel_ranks.pair(shared, True, torch.float32)
        x = torch.randn(8, 2, tensor_parallel_ranks.HIDDEN, device=here(), requires_grad=True)

        def alive() -> int:
            layer(x).sum().backward()
            dist.barrier()
            messages.sent.clear()
            return sum([issubclass(type(one), torch.Tensor) for one in gc.get_objects()])

        alive()
        gc.collect()
        gc.disable()
        try:
            first = alive()
            for _ in range(3):
                last = alive()
        finally:
            gc.enable()
        return last - first


def rings_in_peer_memory(rank: int, cases: Any) -> Any:
    """`context_cases.outcomes` whose rings pass tensors so, however small they are, and how many.

    On GPUs that is peer memory.
    """
    rings: dict[Any, PeerMessages] = {}

    def messages(group: Any, device: torch.device, count: int, ring: bool) -> PeerMessages:
        assert ring
        return rings.setdefault(group, PeerMessages(group))

    patch = pytest.MonkeyPatch()
    patch.setattr(peer_memory, "LEAST_BYTES", 0)
    if here().type == "cpu":
        patch.setattr(exchange, "peer_memory", messages)
    try:
        found = outcomes(rank, cases)
        dist.barrier()  # nobody leaves while another still receives
        return found, sum([one.received for one in rings.values()])
    finally:
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
