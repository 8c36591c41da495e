"""The documented import path of `Linear`."""

from transformer_engine.pytorch.modules.linear import Linear

__all__ = ["Linear"]
