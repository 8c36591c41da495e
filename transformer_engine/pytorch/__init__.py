"""Transformer layers in FP8 for PyTorch.

>>> import torch
>>> import transformer_engine.pytorch as te
>>> layer = te.Linear(32, 32, device="cpu")
>>> with te.fp8_autocast(enabled=True):
...     loss = layer(torch.randn(16, 32)).sum()
>>> loss.backward()
"""

from typing import NoReturn

import torch

from transformer_engine import _C, _absent, _build, _torch_check  # noqa: F401 - refuses old torch
from transformer_engine.common.roles import QuantizerRole
from transformer_engine.pytorch import (
    _compat,
    constants,
    cpp_extensions,
    distributed,
    fp8,
    module,
    ops,
    optimizers,
)
from transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    attention_backends,
)
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding
from transformer_engine.pytorch.chain.gemm import gemm_report
from transformer_engine.pytorch.chain.parallel_report import ParallelReport, parallel_report
from transformer_engine.pytorch.chain.user_buffers import (
    UserBufferQuantizationMode,
    destroy_ub,
    initialize_ub,
)
from transformer_engine.pytorch.convert.convert import ConversionReport, convert
from transformer_engine.pytorch.cross_entropy import linear_cross_entropy, parallel_cross_entropy
from transformer_engine.pytorch.cuda_graphs.callables import make_graphed_callables
from transformer_engine.pytorch.dtypes import DType
from transformer_engine.pytorch.export.onnx import onnx_export
from transformer_engine.pytorch.fp8.autocast import autocast, fp8_autocast, get_default_recipe
from transformer_engine.pytorch.fp8.availability import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch.fp8.model_init import fp8_model_init, quantized_model_init
from transformer_engine.pytorch.layers.transformer_layer import TransformerLayer
from transformer_engine.pytorch.module.fp8_padding import Fp8Padding, Fp8Unpadding
from transformer_engine.pytorch.module.glu_rows import (
    deinterleave_glu_tensor,
    interleave_glu_tensor,
)
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm
from transformer_engine.pytorch.moe.chunks import (
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
)
from transformer_engine.pytorch.moe.padding import moe_permute_and_pad_with_probs
from transformer_engine.pytorch.moe.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_unpermute,
)
from transformer_engine.pytorch.offload.context import get_cpu_offload_context, mark_not_offload
from transformer_engine.pytorch.offload.manual import ManualOffloadSynchronizer
from transformer_engine.pytorch.parallel.gradients import all_reduce_sequence_parallel_grads
from transformer_engine.pytorch.parallelize.parallelize import parallelize
from transformer_engine.pytorch.recompute.checkpoint import checkpoint
from transformer_engine.pytorch.rng import CudaRNGStatesTracker
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)

_compat.install()
_C.set_num_threads(torch.get_num_threads())
_build.warn_of_left_out(torch.cuda.device_count)

__all__ = [
    "ConversionReport",
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "ManualOffloadSynchronizer",
    "MultiheadAttention",
    "ParallelReport",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "UserBufferQuantizationMode",
    "all_reduce_sequence_parallel_grads",
    "attention_backends",
    "autocast",
    "checkpoint",
    "constants",
    "convert",
    "cpp_extensions",
    "deinterleave_glu_tensor",
    "destroy_ub",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "gemm_report",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "initialize_ub",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "linear_cross_entropy",
    "make_graphed_callables",
    "mark_not_offload",
    "module",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "onnx_export",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "parallel_report",
    "parallelize",
    "prepare_for_saving",
    "quantized_model_init",
    "restore_from_func_ctx",
    "restore_from_saved",
]


def __dir__() -> list[str]:
    """What is public; parts of it are modules, such as `attention`, that are documented paths."""
    return __all__


def __getattr__(name: str) -> NoReturn:
    _absent.refuse(__name__, name)
