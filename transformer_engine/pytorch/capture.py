"""Whether a CUDA graph is being captured."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Whether the current stream of the current device is captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
