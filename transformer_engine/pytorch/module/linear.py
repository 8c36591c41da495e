"""The documented import path of `Linear`, and of the GEMM that trainers take from it."""

from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm
from transformer_engine.pytorch.modules.linear import Linear

__all__ = ["Linear", "general_gemm"]
