"""Environment variables of the debugger: the only module of the package that uses them."""

from __future__ import annotations

import os
import time

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
_STAMP = "NVDLFW_INSPECT_LOG_TIMESTAMP"


def log_level() -> int:
    """NVDLFW_INSPECT_LOG_LEVEL: messages below it are not written; INFO by default."""
    return _LEVELS.get(os.environ.get("NVDLFW_INSPECT_LOG_LEVEL", "").upper(), _LEVELS["INFO"])


def log_overwrite() -> bool | None:
    """NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE: 0 appends to all log files, 1 truncates all of them.

    Unset: text logs start anew, JSON lines are appended.
    """
    value = os.environ.get("NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE", "").strip()
    return None if not value else value != "0"


def log_stamp() -> str:
    """The stamp in the names of log files, "" without NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP=1.

    NVDLFW_INSPECT_LOG_TIMESTAMP holds the stamp. If it is not set, the first call sets it to the
    current time, so that later sessions and child processes get the same stamp.
    """
    if os.environ.get("NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP", "").strip() in ("", "0"):
        return ""
    return os.environ.setdefault(_STAMP, time.strftime("%Y%m%d_%H%M%S"))


def launched_rank() -> int:
    """RANK, which launchers such as torchrun set; 0 if it is not set."""
    value = os.environ.get("RANK", "")
    return int(value) if value.isdigit() else 0
