"""train_gpt.py under torchrun: each run resumes from the checkpoint of another layout."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import start_ranks
from train_gpt_ranks import run_layouts

import train_gpt

SIZE = "--layers 1 --hidden 32 --heads 2 --seq 32 --batch 4 --steps 12 --validate-every 6 --lr 3e-3"
FLAGS = [*SIZE.split(), "--data", "text", "--device", "cpu", "--precision", "fp32"]
# (number of ranks, flags): each run resumes where the one before it has stopped.
LAYOUTS = (
    (2, "--ddp"),
    (2, "--tp 2"),
    (4, "--tp 2 --sp --fsdp"),
    (4, "--cp 2 --ddp"),
    (4, "--tp 2 --sp --cp 2"),
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = random.Random(0).choices(["scale", "amax", "history", "of", "the", "tensor"], k=3000)
    Path("text").write_text(" ".join(words))


def _torchrun(*arguments: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", train_gpt.__file__]
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    started = subprocess.run(
        [sys.executable, *launcher, *FLAGS, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    return started.stdout


def _check_run_of_one_process() -> None:
    """Asserts that the results in `run.pt` agree with those in `one.pt`."""
    found, expected = torch.load("run.pt"), torch.load("one.pt")
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=0.0)
    for (steps, loss), (other_steps, other) in zip(
        found["validation"], expected["validation"], strict=True
    ):
        assert steps == other_steps
        assert loss == pytest.approx(other, rel=1e-4)
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=0.0, atol=2e-3)


def test_ranks_go_on_with_each_other() -> None:
    """The losses are those of one process."""
    assert train_gpt.main([*FLAGS, "--sample", "0", "--checkpoint", "one.pt"]) == 0
    runs = []
    for i, (ranks, layout) in enumerate(LAYOUTS):
        arguments = [*FLAGS, *layout.split(), "--checkpoint", "run.pt", "--sample", "2"]
        arguments += ["--resume"] if i else []
        runs.append((ranks, [*arguments, "--stop-after", str(2 * i + 2)]))
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    start_ranks(run_layouts, (port, runs), 4, "gloo")
    output = _torchrun("--fsdp", "--checkpoint", "run.pt", "--resume", "--sample", "8")
    assert "(2 ranks, fsdp), steps 10 to 12" in output
    assert output.count("--- sample") == 1  # from the first rank
    _check_run_of_one_process()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ddp", "--ddp needs ranks: torchrun --nproc-per-node 2"),
        ("--tp 2 --sp --cp 2", "--tp 2 --cp 2 --sp needs ranks: torchrun --nproc-per-node 4"),
        ("--sp", "--sp needs --tp above 1"),
        ("--tp 0", "--tp and --cp must be above 0"),
    ],
)
def test_ranks_are_started_by_torchrun(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_gpt.main([*FLAGS, *flags.split()])
    assert message in " ".join(capsys.readouterr().err.split())
