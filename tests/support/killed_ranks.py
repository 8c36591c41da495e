"""Runs train_gpt.py on two ranks of distributed/test_killed_rank; one rank is killed."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from train_gpt_runs import TINY

import train_gpt
from gpt.training import Training

SAVED, LAST_STEP = 6, 9  # steps of the last checkpoint; steps of rank 1 before it is killed
CONFIG = """\
look:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, gradient]
      stats: [max, l2_norm]
"""


def train(rank: int, folder: Path, ports: tuple[int, int], ends: bool) -> None:
    """Trains to the end, then again with a rank that is killed; or resumes that training.

    If `ends` is set, both trainings start from scratch. Otherwise the second one resumes from its
    checkpoint.
    """
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost"}
    if ends:
        _run("whole", ports[0])
        with patch.object(Training, "step", autospec=True, side_effect=_dying(rank)):
            try:
                _run("parts", ports[1])
            except RuntimeError as error:
                Path(f"error.{rank}").write_text(str(error))
                raise
    else:
        _run("parts", ports[0], "--resume")


def _run(name: str, port: int, *more: str) -> None:
    os.environ["MASTER_PORT"] = str(port)
    results = ["--checkpoint", f"{name}.pt", "--inspect", "config.yaml", "--inspect-log", name]
    flags = [*TINY, "--data", "text", "--device", "cpu", "--ddp", "--sample", "0"]
    if train_gpt.main([*flags, *results, *more]):
        raise AssertionError(f"{name} has failed")


def _dying(rank: int) -> Any:
    step = Training.step

    def run(training: Training) -> None:
        if rank == 1 and training.done == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        step(training)

    return run
