"""What ranks of distributed/test_train_gpt_on_ranks run: the example, as under torchrun."""

import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

import train_gpt


def run_layouts(number: int, port: int, runs: Sequence[tuple[int, list[str]]]) -> None:
    """The example with these arguments, one run after the other, each with so many ranks.

    Args:
        number: of this process; those above the ranks of a run sit it out.
        port: of the first run; each has one of its own.
        runs: how many ranks, and what the command line says.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    for i, (ranks, arguments) in enumerate(runs):
        while i and not Path(f"ended.{i - 1}").exists():  # the checkpoint of the run before
            time.sleep(0.05)
        if number >= ranks:
            continue
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port + i)}
        os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(number), "LOCAL_RANK": str(number)}
        if train_gpt.main(arguments):
            sys.exit(f"rank {number} of {arguments} failed")
        if number == 0:
            Path(f"ended.{i}").touch()
