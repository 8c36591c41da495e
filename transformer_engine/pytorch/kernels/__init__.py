"""Native operations as Python functions: each allocates its outputs and makes one `_C` call.

One module per op family. Nothing here knows modules, recipes or autograd; every function also works
under `torch.compile`, as a `torch.ops.te` operator (see `library.py`).
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from transformer_engine import _C, _env

for _library in ("CUBLASLT", "CUDNN", "NCCL"):
    _C.set_library_path(_library, _env.library_path(_library))
_C.set_device_switches(*_env.device_variables())


def _allocate_lasting(size: int, device: int) -> torch.Tensor:
    """Memory of a workspace, which the core never returns.

    It must not come from a pool that owns what its user allocates, as a capture's or that of
    `torch.compile(mode="reduce-overhead")` does: such a pool serves the thread, or the stream, that
    runs. Another thread gets memory of the default stream.
    """
    with ThreadPoolExecutor(1) as other:
        return other.submit(_allocate_scratch, size, device).result()


def _allocate_scratch(size: int, device: int) -> torch.Tensor:
    """Memory for one call."""
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


_C.set_workspace_allocators(_allocate_lasting, _allocate_scratch)
