"""How values are written into quantised tensors, and into pieces of one that several ranks have.

If a weight has one scale, all its pieces have the same scale. It follows from the amax over all
ranks, which one collective finds for all weights that are written together. If this process has the
whole weight, writing a slice may multiply the weight's scale by a power of two: other values stay
the same, unless they become too small for the new scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch._torch_private import same_storage
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.fp8.casts.operands import scale_pair
from transformer_engine.pytorch.kernels.amax import amax
from transformer_engine.pytorch.kernels.quantize import quantize_many
from transformer_engine.pytorch.notices import has_warned, warn_once
from transformer_engine.pytorch.scale_layout import layout_of

if TYPE_CHECKING:
    from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor


_ROUNDED = 1.01  # the largest code also stands for values that are larger by up to this factor
_MOST = 2.0**125  # bound of scale and 1/scale for slices; beyond, one of them loses bits
_LOST = "assigned data in a larger tensor"
_HALF_OF_RANGE = torch.finfo(torch.float32).max / 2


class ShardRanks:
    """The ranks that have pieces of one weight, over which the amax of the weight is reduced.

    Args:
        initial: the `InitialValue` of this rank's piece, where it is kept.
        layer: process groups that share the layer, so that each rank has a part of the weight.
        groups: process groups of `fully_shard`, which cuts that part again; None until they are
            known, () if `fully_shard` has cut nothing.
        room: rows of the memory in which `fully_shard` keeps a piece, the same number on all ranks;
            None where the piece is a view of the weight.
    """

    def __init__(
        self,
        initial: Any = None,
        layer: tuple[Any, ...] = (),
        groups: tuple[Any, ...] | None = None,
        room: int | None = None,
    ) -> None:
        self.initial, self.layer, self.groups, self.room = initial, layer, groups, room
        self.rows = 0  # how many rows of that memory are the piece; 0 before it is cut

    def reduce(self, amaxes: torch.Tensor, label: str) -> torch.Tensor:
        """Reduce amaxes of pieces to those of whole weights, in place.

        Raises:
            RuntimeError: it is not known yet which ranks have the other pieces.
        """
        if self.groups is None:
            raise RuntimeError(
                "[fully_shard] expected the first forward or load_state_dict before a piece of "
                f"{label} is written otherwise: its scale is that of all pieces, and until then "
                "nothing says which ranks have them; a clone() of it has a scale of its own"
            )
        for group in (*self.groups, *self.layer):
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        return amaxes

    def uncut(self) -> ShardRanks | None:
        """Only the ranks that share the layer, without `fully_shard`; None if there are none."""
        return ShardRanks(layer=self.layer, groups=()) if self.layer else None


def scale_ranks_of(tensor: QuantizedTensor) -> ShardRanks | None:
    """The ranks that have pieces of a weight; None where this rank has the whole weight."""
    return getattr(tensor._quantizer, "ranks", None)


def ranks_of(tensor: QuantizedTensor) -> ShardRanks | None:
    """`scale_ranks_of`, for tensors that `fully_shard` has cut; None for others."""
    ranks = scale_ranks_of(tensor)
    return None if ranks is None or ranks.groups == () else ranks


def shares_scale(tensor: QuantizedTensor) -> bool:
    """Whether a tensor is a piece whose scale is that of all pieces of a weight."""
    cut = ranks_of(tensor) is not None and not layout_of(tensor._format).in_blocks
    return cut or codes_around(tensor) is not None


def codes_around(tensor: QuantizedTensor) -> torch.Tensor | None:
    """All codes of the weight or piece that a slice is cut from; None for tensors not sliced."""
    whole = tensor._whole
    if whole is None or whole.numel() == tensor.numel():
        return None
    return whole if is_in_weight(tensor) or is_kept(tensor) else None


def is_in_weight(tensor: QuantizedTensor) -> bool:
    """Whether a view has codes of a weight that this process has as a whole, and writes alone."""
    whole, ranks = tensor._whole, scale_ranks_of(tensor)
    if whole is None or (ranks is not None and ranks.groups):
        return False
    return not is_kept(tensor) and same_storage(whole, tensor.parts[0])  # type: ignore[arg-type]


def is_kept(tensor: QuantizedTensor) -> bool:
    """Whether a tensor is what `fully_shard` keeps of a weight, or a view of that."""
    ranks = scale_ranks_of(tensor)
    return ranks is not None and ranks.room is not None


def alone(tensor: QuantizedTensor) -> QuantizedTensor:
    """A copy, which can be written independently of other pieces of the weight.

    The exception is a piece whose ranks are known: they write its copy together, too, because a
    caller who copies it back needs the scale of all pieces.
    """
    copy = tensor.mapped(torch.clone)
    ranks, quantizer = ranks_of(tensor), tensor._quantizer
    if ranks is not None and ranks.groups is None:
        copy._quantizer = quantizer.over(ranks.uncut())  # type: ignore[union-attr]
    return copy


def parts_for(tensor: QuantizedTensor, other: QuantizedTensor) -> Sequence[torch.Tensor | None]:
    """The parts that a tensor takes over from another one.

    Parts of a piece that shares its scale with other pieces are copied: if they were written with
    another scale, the values of the other pieces would change.
    """
    piece = shares_scale(other) and not shares_scale(tensor)
    return (alone(other) if piece else other).parts


def warn_of_lost_alias(tensor: QuantizedTensor, values: torch.Tensor) -> None:
    """Warn once where an assignment to `data` seems to move a weight into a buffer of its trainer.

    The sign is that the new data has the same values and is a part of a larger tensor.
    """
    if has_warned(_LOST) or torch.compiler.is_compiling() or is_capturing():
        return
    if type(values) is not torch.Tensor or values.is_meta:
        return
    if values.untyped_storage().nbytes() > values.nbytes and values.equal(tensor.plain_values()):
        warn_once(
            f"[{type(tensor).__name__}] expected data that no other tensor shares, got a part of a "
            f"larger tensor: its values are copied, and what is written there later does not reach "
            f"{tensor.label} (ZeroRedundancyOptimizer: leave parameters_as_bucket_view=False)",
            about=_LOST,
            stacklevel=3,
        )


def write_unless(noop: torch.Tensor, tensor: QuantizedTensor, values: torch.Tensor) -> None:
    """`write`, without effect where a flag on the device is not 0, and without a wait for it."""
    quantizer: Any = tensor._quantizer
    recorded = () if quantizer is None else quantizer.persistent_tensors()  # amaxes among them
    candidates = (codes_around(tensor), *tensor.parts, *recorded)
    written = [part for part in candidates if part is not None]
    before = [part.clone() for part in written]
    write([tensor], [values])
    skip = (noop != 0).reshape(())
    for part, old in zip(written, before, strict=True):
        part.copy_(torch.where(skip, old, part))


def takes_amax(tensor: QuantizedTensor) -> bool:
    """Whether a tensor is written with one scale, that of the largest magnitude of its values."""
    writer: Any = tensor._quantizer
    return getattr(writer, "writes_weights", False) and not layout_of(tensor._format).in_blocks


def write(
    tensors: Sequence[QuantizedTensor],
    values: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor | None] = (),
) -> None:
    """Quantise values into tensors.

    Args:
        tensors: of any kind, no two of which share memory; the ranks of a group write the same
            weights in the same order.
        values: one tensor of the same shape for each.
        amaxes: fp32 `[1]`, the amaxes of values for tensors that `takes_amax`, or None where an
            amax is not known; empty if none are known.
    """
    batches: dict[Any, list[tuple[Any, torch.Tensor, torch.Tensor]]] = {}
    for tensor, plain, largest in _scaled(tensors, values, amaxes or [None] * len(tensors)):
        key = (tensor._quantizer.rule, plain.dtype, plain.device)
        batches.setdefault(key, []).append((tensor, plain, largest))
    for batch in batches.values():
        _write_scaled(batch)


def _scaled(
    tensors: Sequence[QuantizedTensor],
    values: Sequence[torch.Tensor],
    known: Sequence[torch.Tensor | None],
) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Yields tensors that `takes_amax`, their values and amaxes; others are written here."""
    pieces: dict[Any, tuple[ShardRanks, list[tuple[Any, torch.Tensor, torch.Tensor]]]] = {}
    checked = [_writable(tensor, value) for tensor, value in zip(tensors, values, strict=True)]
    for tensor, plain, own in zip(tensors, checked, known, strict=True):
        if tensor.is_meta:
            continue
        ranks, whole = scale_ranks_of(tensor), codes_around(tensor)
        if not takes_amax(tensor):
            tensor.overwrite(tensor.quantized(plain))
            continue
        if ranks is not None and is_in_weight(tensor):
            ranks = ranks.uncut()
        if whole is not None:
            _write_slice(tensor, plain, whole, ranks)
            continue
        largest = amax(plain) if own is None else own
        if ranks is None:
            yield tensor, plain, largest
        else:
            key = (ranks.groups, ranks.layer)
            pieces.setdefault(key, (ranks, []))[1].append((tensor, plain, largest))
    for ranks, found in pieces.values():
        amaxes = torch.cat([one for *_, one in found])
        reduced = ranks.reduce(amaxes, found[0][0].label)
        for (tensor, plain, _), largest in zip(found, reduced.split(1), strict=True):
            yield tensor, plain, largest


def _writable(tensor: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """Convert values to what a tensor's quantizer takes; raise if it cannot be written alone."""
    whole = codes_around(tensor)
    if whole is not None and is_kept(tensor):
        raise RuntimeError(
            f"[fully_shard] expected the piece of {tensor.label} to be written as a whole, got a "
            f"slice of {tensor.numel()} of its {whole.numel()} values: all pieces have one scale, "
            "which all ranks find together; let all of them assign piece[i:j] = values"
        )
    return tensor.writable(values)


def _write_slice(
    tensor: QuantizedTensor, plain: torch.Tensor, whole: torch.Tensor, ranks: ShardRanks | None
) -> None:
    """Cast values into some of the codes of a weight, whose scale may change by powers of two.

    All other values stay what they are, unless they are too small for the new scale.
    """
    codes, own = tensor.parts
    assert codes is not None and own is not None
    weight = tensor.with_parts([whole, own], whole.shape)
    values = weight.plain_values(torch.float32)
    start = codes.storage_offset() - whole.storage_offset()
    values.as_strided(codes.shape, codes.stride(), start).copy_(plain)
    largest = amax(values.masked_fill(values.isinf(), 0.0))  # infinities saturate
    if ranks is not None:
        largest = ranks.reduce(largest, tensor.label)
    quantizer: Any = tensor._quantizer
    scales = _moved_scale(scale_pair(own), quantizer.scales_of([largest])[0], largest)
    quantize_many([values], [whole], [], [scales], [], [], tensor._format)
    tensor.drop_transpose()
    weight.overwrite([whole, scales])


def _moved_scale(own: torch.Tensor, wanted: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """`own` times the power of two that brings it close to `wanted`; both are {1/scale, scale}.

    With values above half of the largest fp32 number, which could be rounded up to infinity, the
    result is `wanted`.
    """
    inverse, scale = own.double().split(1)  # whose ratios overflow fp32
    ratio = wanted[1:].clamp(1 / _MOST, _MOST) * _ROUNDED / scale
    power_of_2 = ratio / (2 * torch.frexp(ratio).mantissa)
    moved = torch.cat([inverse / power_of_2, scale * power_of_2]).float()
    return torch.where(largest > _HALF_OF_RANGE, wanted, moved)


def _write_scaled(batch: Sequence[tuple[Any, torch.Tensor, torch.Tensor]]) -> None:
    """Cast values into tensors with one rule, directly into their codes if these are contiguous."""
    made = []
    for tensor, plain, _ in batch:
        codes, _ = tensor.parts
        made.append(codes if codes.is_contiguous() else torch.empty_like(plain, dtype=torch.uint8))
    tensors, values, largest = map(list, zip(*batch, strict=True))
    scales = tensors[0]._quantizer.scales_of(largest)
    quantize_many(values, made, [], scales, [], [], tensors[0]._format)
    overwrite(list(zip(tensors, zip(made, scales, strict=True), strict=True)))


def overwrite(
    contents: Sequence[tuple[QuantizedTensor, Sequence[torch.Tensor | None]]],
) -> None:
    """Copy parts into those of tensors by one call; parts that are already in place are skipped."""
    targets, sources, written = [], [], []
    for tensor, parts in contents:
        tensor.drop_transpose()
        for own, other in zip(tensor.parts, parts, strict=True):
            if own is None or other is None:
                continue
            if other is not own:
                targets.append(own)
                fits = other.shape == own.shape  # tensors that users made may have 1/scale only
                sources.append(other if fits else scale_pair(other)[: own.numel()].view_as(own))
            if not own.is_inference():
                written.append(own)
        # Views of codes that were made below autograd count their writes separately.
        if tensor._whole is not None and not tensor._whole.is_inference():
            written.append(tensor._whole)
    if torch.compiler.is_compiling():  # which has no call for several views
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    elif targets:
        torch._foreach_copy_(targets, sources)
    if written:
        # Below autograd, version counters do not change by themselves. They tell aliases, and
        # graphs that have saved the codes, that the codes were written.
        torch.autograd.graph.increment_version(written)
