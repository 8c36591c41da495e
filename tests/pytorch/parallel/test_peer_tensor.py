"""A tensor in peer memory is lent, copied, or waited for by a transfer that needs the memory."""

from types import SimpleNamespace

import pytest
import torch

from transformer_engine.pytorch.parallel.exchange import _PeerTensor


class Transfer:
    """A transfer that has already received a tensor."""

    def __init__(self, received: torch.Tensor) -> None:
        self.memory, self.released = received.clone(), 0

    def send(self, to: int, x: torch.Tensor) -> None:
        self.sent_to = to

    def borrow(self, sent: torch.Tensor, source: int) -> torch.Tensor:
        return self.memory

    def start_copy(self, source: int, out: torch.Tensor) -> None:
        out.copy_(self.memory)

    def finish(self, out: torch.Tensor) -> None:
        self.finished = out

    def release(self, source: int) -> None:
        self.memory.zero_()  # the next transfer may write there
        self.released += 1


@pytest.fixture
def received() -> torch.Tensor:
    return torch.arange(6.0)


@pytest.fixture
def transfer(received) -> Transfer:
    return Transfer(received)


@pytest.fixture
def pending(transfer, received) -> _PeerTensor:
    memory = SimpleNamespace(start=lambda owner, slot: transfer)
    return _PeerTensor(torch.empty_like(received), memory, to=1, source=2, slot=0)


def test_waiting_copies_and_frees_the_memory(pending, transfer, received) -> None:
    assert torch.equal(pending.wait(), received)
    assert transfer.released == 1
    assert transfer.sent_to == 1
    assert torch.equal(pending.wait(), received)


def test_what_is_lent_lies_in_the_memory_until_it_is_released(pending, transfer, received) -> None:
    lent = pending.lend()
    assert lent.data_ptr() == transfer.memory.data_ptr()
    assert torch.equal(lent, received) and not transfer.released
    pending.release()
    pending.release()
    assert transfer.released == 1


def test_what_is_kept_is_a_copy(pending, transfer, received) -> None:
    pending.lend()
    pending.start_copy()
    assert not transfer.released
    assert torch.equal(pending.keep(), received)
    assert transfer.finished is pending.keep()
    assert transfer.released == 1


def test_lending_after_another_transfer_has_waited(pending, transfer, received) -> None:
    """A later transfer needs the memory, and waits for this one before the tensor is lent."""
    copy = pending.wait()
    assert torch.equal(pending.lend(), received)
    pending.start_copy()
    assert pending.keep() is copy
    assert torch.equal(copy, received)
    assert transfer.released == 1
