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


def _allocate_workspace(size: int, device: int) -> torch.Tensor:
    """Zeros of at least `size` bytes for a stream's first use of a workspace, also in a capture.

    The table keeps them for good, so they must not come from a pool that owns what its user
    allocates, as that of `torch.compile(mode="reduce-overhead")` does: such a pool serves the
    thread, or the stream, that runs. Another thread gets memory of the default stream.
    """
    where, count = torch.device("cuda", device), -(-size // 4)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=where)
    with ThreadPoolExecutor(1) as other:
        made = other.submit(lambda: torch.empty(count, dtype=torch.int32, device=where)).result()
    torch.cuda.current_stream(where).wait_stream(torch.cuda.default_stream(where))
    return made.zero_()


def _allocate_scratch(size: int, device: int) -> torch.Tensor:
    """Memory for one call."""
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


_C.set_workspace_allocators(_allocate_workspace, _allocate_scratch)
