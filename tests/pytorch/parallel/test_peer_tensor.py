"""A tensor in peer memory: lent, kept, and waited for by whoever needs the memory first."""

from types import SimpleNamespace

import pytest
import torch

from transformer_engine.pytorch.parallel.exchange import _PeerTensor


class Transfer:
    """Has received a tensor already."""

    def __init__(self, received: torch.Tensor) -> None:
        self.memory, self.ended = received.clone(), False

    def send(self, to: int, x: torch.Tensor) -> None:
        self.sent_to = to

    def receive(self, sent: torch.Tensor, source: int):
        yield source, self.memory
        self.memory.zero_()  # the next transfer takes it
        self.ended = True


@pytest.fixture
def received() -> torch.Tensor:
    return torch.arange(6.0)


@pytest.fixture
def transfer(received) -> Transfer:
    return Transfer(received)


@pytest.fixture
def pending(transfer, received) -> _PeerTensor:
    memory = SimpleNamespace(stream=None, start=lambda owner: transfer)
    return _PeerTensor(torch.empty_like(received), memory, to=1, source=2)


def test_waiting_copies_and_frees_the_memory(pending, transfer, received) -> None:
    assert torch.equal(pending.wait(), received)
    assert transfer.ended
    assert transfer.sent_to == 1
    assert torch.equal(pending.wait(), received)


def test_what_is_lent_lies_in_the_memory_until_it_is_copied(pending, transfer, received) -> None:
    lent = pending.lend()
    assert lent.data_ptr() == transfer.memory.data_ptr()
    assert not transfer.ended
    assert torch.equal(pending.keep(), received)
    assert transfer.ended


def test_lending_after_another_transfer_has_waited(pending, transfer, received) -> None:
    """A later transfer needs the memory, and waits for this one, before it is lent."""
    copy = pending.wait()
    assert torch.equal(pending.lend(), received)
    assert pending.keep() is copy
    assert torch.equal(copy, received)
