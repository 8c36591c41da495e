"""Warnings that also work in code that torch.compile traces.

torch.compile cannot trace `warnings.warn`. So while it traces, these functions run as constants of
the graph: the warning is given during the trace, and compiled code gives none.
"""

from __future__ import annotations

import warnings

import torch

from transformer_engine.pytorch._torch_private import constant_in_graphs
from transformer_engine.pytorch.fp8.process_state import process_state


def warn(text: str, stacklevel: int = 1, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`; while torch compiles, only once for each text.

    `stacklevel` is counted from the caller.
    """
    if torch.compiler.is_compiling():
        _warn_while_tracing(text, text, category)
    else:
        warnings.warn(text, category, stacklevel=stacklevel + 1)


def warn_once(text: str, about: str = "", stacklevel: int = 1) -> None:
    """Warn, unless there was a warning about the same thing before.

    `about` names the thing; if it is empty, the text itself does.
    """
    if torch.compiler.is_compiling():
        _warn_while_tracing(text, about or text)
    else:
        _warn_of(about or text, text, stacklevel + 1)


def has_warned(about: str) -> bool:
    """Whether `warn_once` has warned about a thing, so that callers need not check it again."""
    return about in process_state().announced


def _warn_of(about: str, text: str, stacklevel: int, category: type[Warning] = UserWarning) -> None:
    announced = process_state().announced
    if about not in announced:
        announced.add(about)
        warnings.warn(text, category, stacklevel=stacklevel + 1)


@constant_in_graphs
def _warn_while_tracing(text: str, about: str, category: type[Warning] = UserWarning) -> None:
    _warn_of(about, text, 2, category)
