"""The documented import path of `RMSNorm`."""

from transformer_engine.pytorch.modules.rmsnorm import RMSNorm

__all__ = ["RMSNorm"]
