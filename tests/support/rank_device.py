"""On which device a rank of the tests works: NCCL's GPU of its number, or the CPU of gloo."""

import torch
import torch.distributed as dist


def here() -> torch.device:
    """Of the calling rank; the CPU where there are none."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")
