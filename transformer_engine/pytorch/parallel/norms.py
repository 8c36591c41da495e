"""The norm of gradients that are sharded over ranks, with few launches and collectives.

Gradients are grouped by the ranks that have other parts of them. Each rank sums the squares of a
group by one kernel, and one all-reduce per process group adds the sums of all its groups.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.kernels.sum_squares import sum_squares
from transformer_engine.pytorch.parallel.dtensors import dtensors, is_dtensor, local_part
from transformer_engine.pytorch.parallel.groups import group_size


class _Kind(NamedTuple):
    """A kind of gradients; the squares of one kind are summed together.

    Attributes:
        groups: the process groups whose ranks have other parts of the gradients.
        device: the device of this rank's parts.
        by_kernel: our kernel supports the dtype of the gradients.
    """

    groups: tuple[Any, ...]
    device: torch.device
    by_kernel: bool


@torch.no_grad()
def total_norm(
    gradients: Sequence[torch.Tensor], cut: Sequence[bool] = (), group: Any = None
) -> torch.Tensor:
    """The Euclidean norm of all gradients together, the same on all ranks.

    Each rank sums the squares of its parts. For each group that shards a gradient, one all-reduce
    of a few values adds up these sums.

    Args:
        gradients: at least one; plain tensors, and DTensors of any meshes and placements.
        cut: for each gradient, whether the ranks of `group` have different parts of it; if not, all
            ranks have the same gradient, and only the first rank counts it.
        group: process group whose ranks pass the same gradients in the same order, or None.

    Returns:
        One value, fp32; fp64 where there are gradients of other dtypes than fp32, fp16 and bf16.
    """
    squares = {kind: _square(own, kind) for kind, own in _by_kind(gradients, cut, group).items()}
    for one, *rest in dict.fromkeys((one, *rest) for groups, *rest in squares for one in groups):
        summands = [kind for kind in squares if one in kind.groups and [*kind[1:]] == rest]
        sums = torch.stack([squares[kind] for kind in summands])
        dist.all_reduce(sums, group=one)
        squares.update(zip(summands, sums.unbind(), strict=True))
    total, *others = squares.values()
    for square in others:
        total = total + square.to(total.device)
    return total.sqrt()


def _by_kind(
    gradients: Sequence[torch.Tensor], cut: Sequence[bool], group: Any
) -> dict[_Kind, list[torch.Tensor]]:
    """This rank's parts that count, by kind. All ranks have the same kinds; some may be empty."""
    found: dict[tuple[tuple[Any, ...], torch.device, bool], list[torch.Tensor]] = {}
    known: dict[tuple[int, tuple[bool, ...]], tuple[Any, ...]] = {}
    alone = group_size(group) == 1
    first = alone or dist.get_rank(group) == 0
    for gradient, is_cut in zip(gradients, cut or [True] * len(gradients), strict=True):
        part, groups = _part_and_groups(gradient, known) if is_dtensor(gradient) else (gradient, ())
        counts = first or is_cut or group in groups
        if not alone and group not in groups:
            groups = (*groups, group)
        parts = found.setdefault((groups, part.device, part.dtype in HIGH_PRECISION), [])
        if counts:
            parts.append(part)
    return {_Kind(*kind): parts for kind, parts in found.items()}


def _part_and_groups(
    gradient: Any, known: dict[tuple[int, tuple[bool, ...]], tuple[Any, ...]]
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """This rank's part of a DTensor, and the groups of ranks with other parts.

    `known` caches groups, by mesh and by which dimensions of the mesh shard the gradient.
    """
    if any([one.is_partial() for one in gradient.placements]):  # no rank has values of the whole
        replicate = dtensors().Replicate()
        gradient = gradient.redistribute(
            placements=[replicate if one.is_partial() else one for one in gradient.placements]
        )
    mesh = gradient.device_mesh
    key = (id(mesh), tuple([not one.is_replicate() for one in gradient.placements]))
    if key not in known:
        cut = [i for i, is_cut in enumerate(key[1]) if is_cut and mesh.size(i) > 1]
        known[key] = tuple([mesh.get_group(i) for i in cut])
    return local_part(gradient), known[key]


def _square(parts: list[torch.Tensor], kind: _Kind) -> torch.Tensor:
    """The sum of the squares of this rank's parts."""
    if not parts:
        dtype = torch.float32 if kind.by_kernel else torch.float64
        return torch.zeros((), dtype=dtype, device=kind.device)
    if kind.by_kernel:
        return sum_squares([part.contiguous() for part in parts]).sum()
    norms = [
        torch.linalg.vector_norm(part, 2, dtype=torch.promote_types(part.dtype, torch.float32))
        for part in parts
    ]
    return torch.stack([norm.double() for norm in norms]).square().sum()


def check_max_norm(op: str, max_norm: Any) -> None:
    """Raise unless `max_norm` is a number that can be a norm, or a tensor, which is not read."""
    if not isinstance(max_norm, numbers.Real | torch.Tensor):
        raise TypeError(f"[{op}] expected max_norm to be a number, got {max_norm!r}")
    if isinstance(max_norm, numbers.Real) and not float(max_norm) >= 0:  # or steps would go uphill
        raise ValueError(f"[{op}] expected max_norm >= 0, got {max_norm}")


def clipping(norm: torch.Tensor, max_norm: Any) -> torch.Tensor:
    """The factor for gradients with this norm, so that their norm is at most `max_norm`."""
    factor: Any = max_norm / (norm + 1e-6)
    return factor.clamp(max=1.0)
