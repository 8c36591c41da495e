"""Stand-ins: the tensors that Python reads while a call is recorded, in place of its inputs.

They are CPU tensors that are never read or written, so they take address space but no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch._torch_private import memory_of, without_modes
from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES

Shape = tuple[int, ...]
Buffers = list[torch.Tensor | None]
Tensors = Sequence[torch.Tensor | None]


def extent(t: torch.Tensor) -> int:
    """The number of bytes from the first element of a tensor to the end of its last one."""
    last = sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)])
    return (last + 1) * t.itemsize


def in_memory_of(
    memory: torch.Tensor,
    start: int | torch.SymInt,
    shape: Shape,
    strides: Shape,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The tensor that begins at a byte of the storage of `memory`. It is no view of `memory`."""
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    tensor.set_(memory.untyped_storage(), start // dtype.itemsize, shape, strides)
    return tensor


@without_modes()
def stand_ins_of(inputs: Tensors) -> Buffers:
    """Stand-ins with the shapes, strides and dtypes of the inputs.

    Parts of one tensor, such as query, key and value of a projection, get parts of one tensor.
    """
    ranges: dict[int, list[int]] = {}  # where parts begin and end, by their memory
    for t in inputs:
        if t is not None and _is_part(t):
            found = ranges.setdefault(memory_of(t), [])
            found += [t.data_ptr(), t.data_ptr() + extent(t)]
    wholes = {
        memory: (min(found), torch.empty(max(found) - min(found), dtype=torch.uint8, device="cpu"))
        for memory, found in ranges.items()
    }

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        if not _is_part(t):
            return torch.empty(t.shape, dtype=t.dtype, device="cpu")
        first, whole = wholes[memory_of(t)]
        return in_memory_of(whole, t.data_ptr() - first, t.shape, t.stride(), t.dtype)

    return [None if t is None else stand_in(t) for t in inputs]


def _is_part(t: torch.Tensor) -> bool:
    return type(t) in PLAIN_TYPES and not (t.is_meta or t.is_contiguous())
