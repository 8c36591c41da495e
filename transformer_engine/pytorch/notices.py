"""Warnings that compiled code may give too: torch.compile cannot trace them, so it makes them."""

from __future__ import annotations

import warnings

import torch

from transformer_engine.pytorch.autocast import autocast_stack


def warn(text: str, stacklevel: int = 1) -> None:
    """`warnings.warn`; while code is compiled, once for a text.

    Args:
        text: for the user.
        stacklevel: as in `warnings.warn`, seen from the caller.
    """
    if torch.compiler.is_compiling():
        _warn_while_tracing(text)
    else:
        warnings.warn(text, stacklevel=stacklevel + 1)


@torch.compiler.assume_constant_result
def _warn_while_tracing(text: str) -> None:
    announced = autocast_stack().announced
    if text not in announced:
        announced.add(text)
        warnings.warn(text, stacklevel=2)
