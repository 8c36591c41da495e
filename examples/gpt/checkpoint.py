"""Checkpoints of train_gpt.py, which survive kills and power failures."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from gpt.settings import UsageError

# The exceptions of `torch.load` for a file that `torch.save` did not write, or a damaged one.
_DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, OSError, RuntimeError, ValueError)


def write_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Replace the file atomically: a kill or a power failure leaves the old file or the new one.

    The content is written to disk (fsync) before the file gets its name, and the name (fsync of the
    folder) before the function returns.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the state that `Training.save` wrote, on the CPU. No code in the file is run.

    Raises:
        UsageError: there is no such file, or it is not a checkpoint of train_gpt.py.
    """
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGED as error:
        raise UsageError(f"{path} is no checkpoint of train_gpt.py, or is damaged") from error
    if not (isinstance(state, dict) and {"settings", "done", "model"} <= state.keys()):
        raise UsageError(f"{path} is no checkpoint of train_gpt.py")
    return state
