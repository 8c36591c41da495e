"""The transpose of all ranks' rows: readable in peer memory, and copied when another call needs it.

`lend` returns codes in peer memory, which are valid until `release`; `wait` returns a copy.
"""

from types import SimpleNamespace

import pytest
import torch

from transformer_engine.pytorch.chain.stages.fp8_gather import _ColumnGather
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix

ROWS, COLS = 4, 3


class Transfer:
    """Stands for a transfer between two ranks, of which this one is the second."""

    def __init__(self, out: torch.Tensor, other: torch.Tensor) -> None:
        self.out, self.other, self.received, self.released = out, other, 0, 0

    def spread(self, own: torch.Tensor) -> None:
        self.own = own.clone()

    def receive_all(self) -> None:
        self.out[:, :ROWS] = self.other.t()
        self.received += 1

    def release_all(self) -> None:
        self.released += 1
        self.out.zero_()  # the next transfer overwrites this memory


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.arange(2 * ROWS * COLS, dtype=torch.uint8).view(2 * ROWS, COLS)


@pytest.fixture
def transfer(rows) -> Transfer:
    return Transfer(torch.zeros(COLS, 2 * ROWS, dtype=torch.uint8), rows[:ROWS])


@pytest.fixture
def gather(transfer, rows) -> _ColumnGather:
    memory = SimpleNamespace(rank=1, start=lambda owner, slot: transfer)
    return _ColumnGather(Fp8Matrix(rows[ROWS:], torch.ones(2), 0), memory, transfer.out)


def test_lent_codes_lie_in_the_memory_until_they_are_released(gather, transfer, rows) -> None:
    assert torch.equal(transfer.own, rows[ROWS:].t())
    lent = gather.lend().codes
    assert lent.data_ptr() == transfer.out.data_ptr()
    assert torch.equal(lent, rows.t()) and not transfer.released
    gather.release()
    gather.release()
    assert (transfer.received, transfer.released) == (1, 1)


def test_whoever_waits_gets_a_copy(gather, transfer, rows) -> None:
    """A later transfer calls `wait` if it needs the memory before the codes are read."""
    codes = gather.wait().codes
    assert transfer.released == 1
    assert torch.equal(codes, rows.t())
    assert gather.lend().codes is codes and gather.wait().codes is codes
    gather.release()
    assert (transfer.received, transfer.released) == (1, 1)
