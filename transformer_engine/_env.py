"""Environment variables: the only module that reads them, each at the moment it is asked for."""

from __future__ import annotations

import os


def library_path(name: str) -> str:
    """TE_<NAME>_PATH: the file to open as CUBLASLT, CUDNN or NCCL; "" leaves the search to us."""
    return os.environ.get(f"TE_{name}_PATH", "")
