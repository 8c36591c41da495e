"""Transformer layers in FP8, BF16, FP16 and FP32 for PyTorch, on NVIDIA GPUs and on CPUs.

`common` and `pytorch` are imported at their first use, so that
`python -m transformer_engine.doctor` runs where torch is missing or broken.

>>> import transformer_engine as te
>>> from transformer_engine.common.recipe import DelayedScaling
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_engine import common, pytorch

try:
    __version__ = version("transformer-engine")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "2.20.0+source"

__all__ = ["__version__", "common", "pytorch"]


def __getattr__(name: str) -> Any:
    if name in ("common", "pytorch"):
        try:
            return import_module(f"{__name__}.{name}")
        except ImportError as error:  # so that `hasattr` of programs that only ask answers False
            raise AttributeError(f"{__name__}.{name} cannot be imported: {error}") from error
    if name == "_C":  # looked up before it is imported as a submodule
        try:
            return import_module(f"{__name__}._C")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"[transformer_engine] expected the extension module _C in {__path__[0]}, got "
                "none: this is a source tree, which hides an installed package; install it (pip "
                "install .) and start Python in another folder, or build in place (CONTRIBUTING.md)"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
