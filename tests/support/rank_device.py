"""The device of a test's rank: the GPU of that number with NCCL, otherwise the CPU."""

import torch
import torch.distributed as dist


def here() -> torch.device:
    """Returns the device of this rank; the CPU outside process groups."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")
