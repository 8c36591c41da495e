"""Checkpoints of train_gpt.py, which last through kills and power failures."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from gpt.settings import UsageError

# What torch raises about bytes that it did not write.
_DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, OSError, RuntimeError, ValueError)


def write_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Replace the file, at once: who dies while writing, or loses power, has the one before.

    What was written is on the disk before the name is, and the name before this returns.
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
    """What `Training.save` wrote, on the CPU. Nothing in the file is run.

    Raises:
        UsageError: there is no such file, or it is something else.
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
