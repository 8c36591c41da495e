"""Warnings that compiled code may give too: torch.compile cannot trace them, so it makes them."""

from __future__ import annotations

import warnings

import torch

from transformer_engine.pytorch._torch_private import constant_in_graphs
from transformer_engine.pytorch.fp8.process_state import process_state


def warn(text: str, stacklevel: int = 1, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`; while code is compiled, once for a text.

    Args:
        text: for the user.
        stacklevel: as in `warnings.warn`, seen from the caller.
        category: likewise.
    """
    if torch.compiler.is_compiling():
        _warn_while_tracing(text, text, category)
    else:
        warnings.warn(text, category, stacklevel=stacklevel + 1)


def warn_once(text: str, about: str = "", stacklevel: int = 1) -> None:
    """Warn the first time that there is something to say about a thing, however many it concerns.

    Args:
        text: for the user.
        about: the thing; empty: the text itself.
        stacklevel: as in `warn`.
    """
    if torch.compiler.is_compiling():
        _warn_while_tracing(text, about or text)
    else:
        _warn_of(about or text, text, stacklevel + 1)


def has_warned(about: str) -> bool:
    """Whether `warn_once` has warned of a thing: there is no need to look for it again."""
    return about in process_state().announced


def _warn_of(about: str, text: str, stacklevel: int, category: type[Warning] = UserWarning) -> None:
    announced = process_state().announced
    if about not in announced:
        announced.add(about)
        warnings.warn(text, category, stacklevel=stacklevel + 1)


@constant_in_graphs
def _warn_while_tracing(text: str, about: str, category: type[Warning] = UserWarning) -> None:
    _warn_of(about, text, 2, category)
