"""Documented names that are not here, and why."""

from __future__ import annotations

import dis
import sys
from typing import NoReturn

_INSTEAD = {
    "MXFP8": "the statistics mxfp8_* of the debugger show what it would do to a training, and"
    " Float8BlockScaling has scales of blocks, too",
    "NVFP4": "four bits have no GEMM and no cast here",
    **dict.fromkeys(
        ("QuantizerRequest", "DelayedScalingRequest"),
        "the quantizers of a CustomRecipe have no scaling state, those of DelayedScaling do",
    ),
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise for an attribute that a module lacks; called by the module's `__getattr__`.

    Raises:
        ImportError: an import statement asks for a name that is listed here. Python would replace
            the message of an AttributeError there.
        AttributeError: in all other cases.
    """
    for start, instead in _INSTEAD.items():
        if name.startswith(start):
            text = f"{module} has no {name}: {start} is not implemented; {instead}"
            asking = sys._getframe(2)
            if asking.f_code.co_code[asking.f_lasti] == dis.opmap["IMPORT_FROM"]:
                raise ImportError(text, name=name)
            raise AttributeError(text)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
