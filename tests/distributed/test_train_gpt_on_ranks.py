"""train_gpt.py under torchrun: two ranks, which go on from each other's checkpoints."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt

SIZE = "--layers 1 --hidden 32 --heads 2 --seq 32 --batch 4 --steps 12 --validate-every 6 --lr 3e-3"
FLAGS = [*SIZE.split(), "--data", "text", "--device", "cpu", "--precision", "fp32"]


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


def test_any_layout_goes_on_with_the_losses_of_one_process() -> None:
    assert train_gpt.main([*FLAGS, "--sample", "0", "--checkpoint", "one.pt"]) == 0
    first = _torchrun("--ddp", "--checkpoint", "run.pt", "--stop-after", "6")
    output = _torchrun("--fsdp", "--checkpoint", "run.pt", "--resume", "--sample", "8")
    assert "(2 ranks, ddp), steps 0 to 12" in first
    assert "(2 ranks, fsdp), steps 6 to 12" in output
    assert output.count("--- sample") == 1  # from the first rank
    found, expected = torch.load("run.pt"), torch.load("one.pt")
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=0.0)
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=0.0, atol=2e-3)


def test_ranks_are_started_by_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.main([*FLAGS, "--ddp"])
    assert "--ddp needs ranks: torchrun --nproc-per-node 2" in capsys.readouterr().err
