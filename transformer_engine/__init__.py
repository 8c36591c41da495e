"""Transformer layers in FP8, BF16, FP16 and FP32 for PyTorch, on NVIDIA GPUs and on CPUs.

>>> import transformer_engine as te
>>> from transformer_engine.common.recipe import DelayedScaling
"""

from importlib.metadata import PackageNotFoundError, version

from transformer_engine import common

try:
    __version__ = version("transformer-engine")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "2.20.0+source"

from transformer_engine import pytorch

__all__ = ["__version__", "common", "pytorch"]
