"""Native operations as Python functions: each allocates its outputs and makes one `_C` call.

One module per op family. Nothing here knows modules, recipes or autograd; every function also works
under `torch.compile`, as a `torch.ops.te` operator (see `library.py`).
"""

import torch

from transformer_engine import _C, _env

for _library in ("CUBLASLT", "CUDNN", "NCCL"):
    _C.set_library_path(_library, _env.library_path(_library))


def _allocate_workspace(size: int, device: int) -> torch.Tensor:
    """Zeros of at least `size` bytes for a stream's first use of a workspace, also in a capture."""
    where = torch.device("cuda", device)
    return torch.zeros(-(-size // 4), dtype=torch.int32, device=where)


_C.set_workspace_allocator(_allocate_workspace)
