"""What the build of this package left out, why, and the command that mends it. Needs no torch."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit


class LeftOut(NamedTuple):
    """A part that this build lacks.

    Attributes:
        part: "CUDA" or "cuDNN attention".
        reason: why, as the build found it.
        command: the command that builds it.
    """

    part: str
    reason: str
    command: str


def left_out() -> list[LeftOut]:
    """The parts that this build lacks, as CMake recorded them in `_C`."""
    from transformer_engine import _C  # noqa: PLC0415 - doctor imports us where it may be broken

    return [LeftOut(part, reason, _in_sources(command)) for part, reason, command in _C.left_out()]


def _in_sources(command: str) -> str:
    """A command whose last argument "." is replaced by the folder of the sources, if known."""
    folder, editable = source_folder()
    if folder and command.endswith(" ."):
        option = "-e " if editable else ""
        return f"{command.removesuffix('.')}{option}{shlex.quote(folder)}"
    return f"in the sources: {command}"


def source_folder() -> tuple[str, bool]:
    """Where `pip install <folder>` took this package from, or "", and whether it is editable."""
    try:
        text = distribution("transformer-engine").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    recorded = json.loads(text or "{}")
    url = urlsplit(recorded.get("url", ""))
    folder = Path(unquote(url.path))
    there = url.scheme == "file" and (folder / "pyproject.toml").is_file()
    return str(folder) if there else "", bool(recorded.get("dir_info", {}).get("editable"))


def warn_of_left_out(gpus: Callable[[], int]) -> None:
    """Warn of each part that a GPU of this machine would use.

    Args:
        gpus: returns the number of visible GPUs; called only where something was left out.
    """
    lacking = left_out()
    if not lacking or not gpus():
        return
    for one in lacking:
        warnings.warn(
            f"[transformer_engine] this machine has a GPU, but the build lacks {one.part}: "
            f"{one.reason}. To have it: {one.command}",
            stacklevel=3,
        )
