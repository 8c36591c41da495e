"""The documented import path of the bases of quantised tensors."""

from transformer_engine.pytorch.quantizers import Quantizer
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

__all__ = ["QuantizedTensor", "Quantizer"]
