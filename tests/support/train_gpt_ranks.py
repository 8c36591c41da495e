"""Runs the example train_gpt.py on ranks, with the environment variables of torchrun."""

import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

import train_gpt


def run_layouts(number: int, port: int, runs: Sequence[tuple[int, list[str]]]) -> None:
    """Runs the example once for each entry of `runs`, one run after the other.

    Args:
        number: number of this process; a run leaves out processes beyond its ranks.
        port: port of the first run; each run has its own.
        runs: pairs of the number of ranks and the command line.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    for i, (ranks, arguments) in enumerate(runs):
        while i and not Path(f"ended.{i - 1}").exists():  # for the previous checkpoint
            time.sleep(0.05)
        if number >= ranks:
            continue
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port + i)}
        os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(number), "LOCAL_RANK": str(number)}
        if train_gpt.main(arguments):
            sys.exit(f"rank {number} of {arguments} failed")
        if number == 0:
            Path(f"ended.{i}").touch()
