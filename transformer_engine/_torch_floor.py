"""Which releases of torch this package works with: the one place that says so.

pyproject.toml and README.md repeat these numbers (tests/test_torch_floor.py compares them), the
doctor and `transformer_engine.pytorch` check them, and `tools/torch_matrix.sh` finds them out.
"""

from __future__ import annotations

import re

OLDEST = (2, 11)
NEWEST_TRIED = (2, 15)


def as_text(release: tuple[int, int]) -> str:
    """A release as text, such as `2.11`."""
    return ".".join(map(str, release))


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of torch's `__version__`.

    >>> release_of("2.11.0a0+git1234")
    (2, 11)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else OLDEST


def complaint(version: str) -> str:
    """What is wrong with this version of torch, and the command that mends it; empty if nothing."""
    if release_of(version) >= OLDEST:
        return ""
    return (
        f"[transformer_engine] expected torch {as_text(OLDEST)} or newer (up to"
        f" {as_text(NEWEST_TRIED)} is tried), got {version}: python -m pip install --upgrade"
        f" 'torch>={as_text(OLDEST)}', on a machine without a GPU with"
        " --index-url https://download.pytorch.org/whl/cpu"
    )
