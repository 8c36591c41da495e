"""The documented import path of `GroupedLinear`."""

from transformer_engine.pytorch.modules.grouped_linear import GroupedLinear

__all__ = ["GroupedLinear"]
