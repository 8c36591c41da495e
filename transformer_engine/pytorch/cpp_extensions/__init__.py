"""The documented import path of single operations."""

from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm

__all__ = ["general_gemm"]
