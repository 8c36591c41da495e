"""Scratch memory for kernels: kept per (device, stream), grown when needed, never shared.

Work on one stream is ordered, so the next op may overwrite what the last one left there. Under a
CUDA graph the buffers must exist before capture; a warm-up call makes them. A buffer that was
outgrown is kept: a captured graph may still write into it.
"""

from __future__ import annotations

import torch

from transformer_engine import _C

_buffers: dict[tuple[str, torch.device, int], torch.Tensor] = {}
_outgrown: list[torch.Tensor] = []


def _stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)


def _buffer(purpose: str, device: torch.device, size: int) -> torch.Tensor:
    key = (purpose, device, _stream_of(device))
    buffer = _buffers.get(key)
    if buffer is None or buffer.nbytes < size:
        if buffer is not None:
            _outgrown.append(buffer)
        buffer = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
        _buffers[key] = buffer
    return buffer


def column_sum_workspace(like: torch.Tensor, rows: int, cols: int) -> torch.Tensor | None:
    """Partial column sums of a `[rows, cols]` value; None on the CPU, which needs none."""
    if like.device.type != "cuda":
        return None
    return _buffer("column_sum", like.device, _C.column_sum_workspace_bytes(rows, cols))


def amax_scratch(device: torch.device) -> torch.Tensor:
    """int32 `[2]`, all zero: kernels that find an amax leave it zero again."""
    return _buffer("amax", device, 8)


def moments_workspace(device: torch.device) -> torch.Tensor | None:
    """What blocks leave for each other when they take moments; None on the CPU."""
    if device.type != "cuda":
        return None
    return _buffer("moments", device, _C.moments_workspace_bytes())
