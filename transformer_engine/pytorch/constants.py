"""The documented import path of constants."""

import torch

from transformer_engine.pytorch.dtypes import TORCH_DTYPES, TORCH_FP8, DType

__all__ = ["TE_DType", "dist_group_type"]

# What the native module calls torch's dtypes.
TE_DType = {dtype: DType(number) for number, dtype in (TORCH_DTYPES | TORCH_FP8).items()}

dist_group_type = torch.distributed.ProcessGroup
