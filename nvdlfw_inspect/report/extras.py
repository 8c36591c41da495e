"""Imports the optional packages of the extra `report`."""

from __future__ import annotations

import importlib
from typing import Any

# This names the packages instead of the extra of our distribution: if the debugger runs from its
# sources, pip would look up the distribution in the index, where its name is another project's.
INSTALL = 'python -m pip install jinja2 "plotly>=6" rich'


class MissingExtraError(ImportError):
    """A package of the extra `report` is not installed."""


def require(module: str, purpose: str) -> Any:
    """Imports `module`, which `purpose` needs.

    Raises:
        MissingExtraError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"[report] {purpose} needs {package}, which is not installed: {INSTALL}"
        ) from None
