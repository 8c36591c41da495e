"""The documented import path of constants."""

import torch

from transformer_engine.pytorch.attention.core.call import BIAS_TYPES
from transformer_engine.pytorch.attention.masks.masks import MASK_TYPES
from transformer_engine.pytorch.dtypes import TORCH_DTYPES, TORCH_FP8, DType

__all__ = [
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "DType",
    "GemmParallelModes",
    "LayerTypes",
    "TE_DType",
    "TE_DType_To_Torch",
    "dist_group_type",
]

# What the native module calls torch's dtypes.
TE_DType = {dtype: DType(number) for number, dtype in (TORCH_DTYPES | TORCH_FP8).items()}
TE_DType_To_Torch = {number: dtype for dtype, number in TE_DType.items()}

AttnMaskTypes = tuple(MASK_TYPES)
AttnBiasTypes = BIAS_TYPES
AttnTypes = ("self", "cross")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)

dist_group_type = torch.distributed.ProcessGroup
