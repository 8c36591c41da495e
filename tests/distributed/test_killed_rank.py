"""Kills a rank of train_gpt.py: the other ends with an error, and the training can be resumed."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_ranks import CONFIG, LAST_STEP, SAVED, train
from ranks import FORKED
from train_gpt_runs import STEPS, assert_same_run, write_text


def _end(folder: Path, ends: bool) -> list[int | None]:
    """Returns the exit codes of both ranks, None for a rank that hangs."""
    with (
        socket.create_server(("localhost", 0)) as one,
        socket.create_server(("localhost", 0)) as other,
    ):
        ports = (one.getsockname()[1], other.getsockname()[1])
    ranks = [FORKED.Process(target=train, args=(rank, folder, ports, ends)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


def _logged(folder: Path, rank: int) -> dict[tuple[int, str, str, str], Any]:
    """Returns the statistics that a rank has written to disk."""
    lines = (folder / f"statistics_rank-{rank}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    key = ("iteration", "layer", "tensor", "statistic")
    return {tuple(row[name] for name in key): row["value"] for row in rows}


def test_the_training_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    Path("config.yaml").write_text(CONFIG)
    assert _end(tmp_path, ends=True) == [1, -signal.SIGKILL]
    assert Path("error.0").read_text()
    assert torch.load("parts.pt")["done"] == SAVED < STEPS
    whole = _logged(Path("whole"), 0)
    for rank in range(2):  # all that was logged before the kill is on disk
        before = {key: value for key, value in whole.items() if key[0] < LAST_STEP}
        assert len(before) == 4 * LAST_STEP and _logged(Path("parts"), rank) == before
    assert _end(tmp_path, ends=False) == [0, 0]
    assert_same_run("whole.pt", "parts.pt")
    assert _logged(Path("parts"), 0) == whole
