"""The precision debugger: features look at tensors of layers while a model is trained.

Programs call the functions of `nvdlfw_inspect.api`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.3"


def __getattr__(name: str) -> Any:
    if name == "_engine":  # looked up before it is imported as a submodule
        try:
            return import_module(f"{__name__}._engine")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"[nvdlfw_inspect] expected the extension module _engine in {__path__[0]}, got "
                "none: this is a source tree, which hides an installed package; install it (pip "
                "install .) and start Python in another folder, or build in place (CONTRIBUTING.md)"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
