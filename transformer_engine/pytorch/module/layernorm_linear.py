"""The documented import path of `LayerNormLinear`, and of the GEMM that trainers take from it."""

from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm
from transformer_engine.pytorch.modules.layernorm_linear import LayerNormLinear

__all__ = ["LayerNormLinear", "general_gemm"]
