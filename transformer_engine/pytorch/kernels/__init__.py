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


def _allocate_zeros(size: int, device: int) -> torch.Tensor:
    """Memory of zeros that the core keeps for good; when this returns, any stream may use it.

    It must not come from a private memory pool, such as that of a CUDA graph capture or of
    `torch.compile(mode="reduce-overhead")`: the owner of the pool would use the memory again. Torch
    takes such a pool for allocations of the current thread or stream. So another thread allocates,
    on the default stream.
    """

    def make() -> torch.Tensor:
        made = torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", device))
        torch.cuda.default_stream(device).synchronize()
        return made

    with ThreadPoolExecutor(1, initializer=_C.relax_captures) as other:
        return other.submit(make).result()


def _allocate_scratch(size: int, device: int) -> torch.Tensor:
    """Memory for one call."""
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


def _counts_tiles() -> bool:
    """Whether thread blocks of GEMMs take tiles from a counter, or are assigned tiles in advance.

    The counter costs a launch. It pays where kernels of NCCL may occupy multiprocessors meanwhile.
    """
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1


_C.set_workspace_functions(_allocate_zeros, _allocate_scratch, _counts_tiles)
