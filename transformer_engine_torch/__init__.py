"""The module name under which programs look for native types and single functions.

>>> import transformer_engine_torch as tex
>>> tex.DType.kFloat8E4M3.name
'kFloat8E4M3'
"""

from transformer_engine.pytorch.dtypes import DType
from transformer_engine_torch.partition import thd_get_partitioned_indices

__all__ = ["DType", "thd_get_partitioned_indices"]
