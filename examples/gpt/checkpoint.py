"""Checkpoints of train_gpt.py, read by whoever goes on with them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from gpt.settings import UsageError

# What torch raises about bytes that it did not write.
_DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, OSError, RuntimeError, ValueError)


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
