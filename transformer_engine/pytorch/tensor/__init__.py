"""Quantised tensors and the quantizers that make them."""

from typing import NoReturn

from transformer_engine import _absent
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.tensor import handlers  # noqa: F401 - fills the table
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
)
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.saving import (
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)

# Other programs distinguish tensors from storages, which autograd does not know. Here both names
# stand for the tensor class.
QuantizedTensorStorage = QuantizedTensor
Float8TensorStorage = Float8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]


def __getattr__(name: str) -> NoReturn:
    _absent.refuse(__name__, name)
