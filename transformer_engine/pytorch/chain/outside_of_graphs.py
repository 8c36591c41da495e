"""Calls that compiled code leaves to Python.

Importing this imports torch's compiler, which takes a second: it is imported where code is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def outside_of_graphs(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(*arguments)` in Python, after a graph break."""
    return function(*arguments)
