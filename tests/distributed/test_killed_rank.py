"""A rank that dies: the other ends with an error, and the training goes on where it was saved."""

import signal
from pathlib import Path

import torch
from killed_ranks import LAST_STEP, train
from ranks import FORKED


def _end(folder: Path, dies: bool) -> list[int | None]:
    """Exit codes of both ranks; None of one that hangs."""
    ranks = [FORKED.Process(target=train, args=(rank, folder, dies)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


def test_the_other_rank_ends_and_the_training_goes_on(tmp_path: Path) -> None:
    assert _end(tmp_path, dies=True) == [1, -signal.SIGKILL]
    assert (tmp_path / "error 0").read_text()
    assert torch.load(tmp_path / "checkpoint")["done"] == LAST_STEP
    assert _end(tmp_path, dies=False) == [0, 0]
    for rank in range(2):
        found = torch.load(tmp_path / f"found {rank}")
        assert found["losses"] == found["expected"]
        assert found["differences"] == []
