"""Slices of FP8 weights, which share their codes, and pieces that `fully_shard` keeps on each rank.

`fully_shard` splits a parameter, asks it for zeros of the size of the first piece and copies its
own piece there, so the last ranks may have fewer rows than room. Before a layer runs it gathers
what `fsdp_pre_all_gather` names, codes as bytes and the scales of blocks, and gets the whole weight
from `fsdp_post_all_gather`. How pieces are written is in `writing`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import tree_map
from transformer_engine.pytorch.notices import warn_once
from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES
from transformer_engine.pytorch.scale_layout import layout_of
from transformer_engine.pytorch.tensor.attributes import InitialValue
from transformer_engine.pytorch.tensor.quantized_tensor import Handler, Parts, QuantizedTensor
from transformer_engine.pytorch.tensor.writing import (
    ShardRanks,
    codes_around,
    is_in_weight,
    is_kept,
    ranks_of,
    shares_scale,
    takes_amax,
)

aten = torch.ops.aten


def _cuts(x: QuantizedTensor, rows: int) -> bool:
    """Whether pieces of so many rows can stay in FP8: pieces of a matrix, made of whole blocks."""
    side = layout_of(x._format).block
    whole_blocks = side is None or not (rows % side[0] or x.shape[0] % rows)
    return getattr(x._quantizer, "writes_weights", False) and x.ndim == 2 and whole_blocks


def _rows(x: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """The piece of these rows. It shares memory with `x`, and the scale if `x` has only one."""
    codes, _, *others = x.parts
    assert codes is not None
    quantizer: Any = x._quantizer
    if ranks_of(x) is None:
        initial = getattr(x, "initial_value", None)
        part = None if initial is None else initial.rows(start, stop)
        layer = () if quantizer.ranks is None else quantizer.ranks.layer
        quantizer = quantizer.over(ShardRanks(part, layer))
    shape, facts = torch.Size((stop - start, x.shape[1])), {**x.facts, "quantizer": quantizer}
    return x.assembled(shape, [codes[start:stop], _scales_of(x, start, stop), *others], facts)


def _scales_of(x: QuantizedTensor, start: int, stop: int) -> torch.Tensor:
    """The scales of these rows, in the same memory."""
    scales, block = x.parts[1], layout_of(x._format).block
    assert scales is not None
    return scales if block is None else scales[start // block[0] : -(-stop // block[0])]


def alias_of(x: QuantizedTensor) -> QuantizedTensor:
    """Another tensor of the same codes and scales."""
    other: QuantizedTensor = x.mapped(lambda part: part)
    if x._whole is not None:
        other._whole = x._whole
        other.drop_transpose()  # it was dated by the version counter of other codes
    return _with_initial(other)


def _with_initial(piece: QuantizedTensor) -> QuantizedTensor:
    """The piece, with the methods of the `InitialValue` that this rank keeps for it, if any."""
    ranks = ranks_of(piece)
    if ranks is not None and ranks.initial is not None:
        ranks.initial.attach(piece)
    return piece


def _shared_codes(x: QuantizedTensor) -> torch.Tensor | None:
    """The codes of which slices of `x` are views; None where a slice is a dequantised copy.

    Slices share codes of weights with one scale, and of the pieces that `fully_shard` keeps.
    """
    codes, whole = x.parts[0], codes_around(x)
    if codes is None or not takes_amax(x) or not codes.is_contiguous():
        return None
    if whole is not None:
        return whole
    if is_in_weight(x) or is_kept(x):
        return codes if x._whole is None else x._whole
    return codes if ranks_of(x) is None else None


def _sliced(x: QuantizedTensor, dim: int, cut: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `cut` to the codes along their first dimension; the slices have the weight's scale."""
    codes, scales = x.parts[:2]
    whole = _shared_codes(x)
    if whole is None or codes is None or not x.ndim or dim not in (0, -x.ndim):
        return NotImplemented

    def slice_of(part: torch.Tensor) -> QuantizedTensor:
        piece: QuantizedTensor = x.assembled(part.shape, [part, scales], x.facts)
        piece._whole = whole
        return piece

    return tree_map(slice_of, cut(codes))


def _split(x: QuantizedTensor, rows: int, dim: int = 0) -> Any:
    if dim != 0 or not x.ndim or not x.shape[0]:
        if dim != 0 and getattr(x._quantizer, "writes_weights", False):
            warn_once(
                f"[{type(x).__name__}] expected pieces of rows, got a split of dim {dim}: those of"
                f" {x.label} are dequantised"
            )
        return NotImplemented
    if not getattr(x._quantizer, "writes_weights", False):
        return _split_codes(x, rows)
    if x.ndim != 2 or shares_scale(x):
        return _sliced(x, dim, lambda codes: list(codes.split(rows)))
    if not _cuts(x, rows):
        warn_once(
            f"[{type(x).__name__}] expected pieces of whole blocks, of 128 rows, got {rows} of "
            f"{x.shape[0]} rows: those of {x.label} are dequantised"
        )
        return NotImplemented
    starts = range(0, x.shape[0], rows)
    pieces = [_rows(x, start, min(start + rows, x.shape[0])) for start in starts]
    # A weak reference, so that dropped pieces are freed. Views of a piece share its quantizer.
    x._room = rows, weakref.ref(pieces[0]._quantizer)
    whole = _shared_codes(x)
    for piece in pieces:
        piece._whole = whole
    return pieces


def _split_codes(x: QuantizedTensor, rows: int) -> Any:
    """Pieces that can only be read: writing one would change the scale of the others."""
    if layout_of(x._format).in_blocks:
        return NotImplemented
    codes, scales = x.parts
    assert codes is not None and scales is not None
    facts = {**x.facts, "quantizer": None}
    return [x.assembled(part.shape, [part, scales], facts) for part in codes.split(rows)]


def _slice(
    x: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    if step != 1 or not x.ndim:
        return NotImplemented
    if is_kept(x) and dim == 0 and x.ndim == 2:
        begin, stop, _ = slice(start, end).indices(x.shape[0])
        ranks: Any = ranks_of(x)
        ranks.rows = ranks.rows or stop  # the first to slice is `fully_shard` itself
        if not begin and stop == ranks.rows:
            return _piece(x, stop)
    return _sliced(x, dim, lambda codes: codes[start:end])


def _piece(x: QuantizedTensor, rows: int) -> Any:
    """This rank's piece: the first `rows` rows of the memory that `fully_shard` keeps for it."""
    if rows == x.shape[0]:
        return alias_of(x)
    if layout_of(x._format).in_blocks:
        return NotImplemented
    return _with_initial(_rows(x, 0, rows))


def room_for(x: QuantizedTensor, size: Sequence[int], options: dict[str, Any]) -> Any:
    """An FP8 tensor of zeros to which `fully_shard` will copy a piece; None for other requests.

    It has the scale of the weight, because a rank without rows needs it to read gathered codes.
    """
    asked = {name for name, value in options.items() if value is not None}
    rows, writer = _next_room(x)
    if writer is None or tuple(size) != (rows, x.shape[1]) or asked - {"pin_memory"}:
        return None
    if not is_kept(x):
        writer = writer.over(ShardRanks(writer.ranks.initial, writer.ranks.layer, room=rows))
    codes: Any = x.parts[0]
    return writer.holding(codes.new_zeros(size), _scales_of(x, 0, rows).clone(), x.dtype)


def _next_room(x: QuantizedTensor) -> tuple[int, Any]:
    """How many rows `fully_shard` may ask for, and the quantizer of such a piece, or None.

    It asks after it has cut a weight, and again for a piece with fewer rows than other ranks have.
    """
    if is_kept(x):
        ranks: Any = ranks_of(x)
        fewer = x.ndim == 2 and x.shape[0] < ranks.room
        return ranks.room, x._quantizer if fewer else None
    (rows, writer), x._room = x._room, QuantizedTensor._room
    return rows, writer()


def _as_strided(
    x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    same = torch.Size(size) == x.shape and tuple(stride) == x.stride() and not offset
    return alias_of(x) if same else NotImplemented


HANDLERS: dict[Any, Handler] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: lambda x, sizes, dim=0: _sliced(
        x, dim, lambda codes: list(codes.split(sizes))
    ),
    aten.slice.Tensor: _slice,
    aten.select.int: lambda x, dim, index: _sliced(x, dim, lambda codes: codes[index]),
    aten.unbind.int: lambda x, dim=0: _sliced(x, dim, lambda codes: list(codes.unbind())),
    aten.as_strided.default: _as_strided,
}


def piece_of(parameter: torch.Tensor) -> QuantizedTensor | None:
    """A parameter that is kept in FP8, or this rank's piece of it; None for others."""
    if isinstance(parameter, QuantizedTensor):
        return parameter
    if type(parameter) in PLAIN_TYPES:
        return None
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return None
    dtensor: Any = parameter
    with torch.no_grad():
        piece = dtensor.to_local()
    if not isinstance(piece, QuantizedTensor):
        return None
    ranks = ranks_of(piece)
    if ranks is not None and ranks.groups is None:
        shards = [i for i, placement in enumerate(dtensor.placements) if placement.is_shard()]
        ranks.groups = tuple([mesh.get_group(i) for i in shards])
    return piece


def with_piece(parameter: Any, piece: torch.Tensor) -> torch.Tensor:
    """A DTensor like `parameter`, with another local piece; `piece` if `parameter` is not cut."""
    if isinstance(parameter, QuantizedTensor):
        return piece
    mesh, placements = parameter.device_mesh, parameter.placements
    size = {"shape": parameter.shape, "stride": parameter.stride()}
    kind: Any = type(parameter)
    return kind.from_local(piece, mesh, placements, run_check=False, **size)


def initial_value(parameter: Any) -> Any:
    """The `InitialValue` of an FP8 parameter, or of this rank's piece of it; None without one."""
    piece = piece_of(parameter)
    ranks = None if piece is None else ranks_of(piece)
    return getattr(parameter, "initial_value", None) if ranks is None else ranks.initial


def attach_initial_value(weight: Any) -> InitialValue:
    """A new `InitialValue` for an FP8 parameter, or for this rank's piece of one."""
    initial, ranks = InitialValue(), ranks_of(weight)
    initial.attach(weight)
    if ranks is not None:
        ranks.initial = initial
    return initial


class ShardableTensor(QuantizedTensor):
    """Base of quantised tensors that `fully_shard` may cut, with the hooks that it looks for."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], torch.Size]:
        """The tensors to gather, codes `[room, cols]` and scales of blocks; and metadata.

        Args:
            mesh: one-dimensional, of the ranks with the other pieces.
            outer_size: the size of the whole weight, which is the metadata.
            outer_stride: the strides of the whole weight.
            module: the module of the weight.
            mp_policy: the policy for mixed precision, which has no effect on codes.
        """
        ranks = ranks_of(self)
        if ranks is not None:
            ranks.groups = (mesh.get_group(),)
        codes, scales = self.parts[:2]
        assert codes is not None and scales is not None
        room = -(-outer_size[0] // mesh.size())
        if codes.shape[0] < room:
            codes = torch.cat([codes, codes.new_zeros(room - codes.shape[0], codes.shape[1])])
        return (codes, scales) if layout_of(self._format).in_blocks else (codes,), outer_size

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[torch.Tensor],
        metadata: torch.Size,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The whole weight around what was gathered.

        Args:
            all_gather_outputs: the gathered tensors of all ranks, concatenated along rows.
            metadata: the size of the whole weight.
            param_dtype: the nominal dtype of the whole weight.
            out: the weight of an earlier call, which gets the new parts; None makes a new one.
        """
        codes, *scales = all_gather_outputs
        others = [None] * (len(self.parts) - 2)
        parts: Parts = [codes[: metadata[0]], *(scales or self.parts[1:2]), *others]
        if out is not None:
            out.adopt(parts)
            return None
        quantizer: Any = self._quantizer
        facts = {**self.facts, "dtype": param_dtype, "quantizer": quantizer.over(None)}
        return self.assembled(metadata, parts, facts), ()


# `fully_shard` asks for the signature of this hook in every gather; a stored one is found faster.
_HOOK: Any = ShardableTensor.fsdp_pre_all_gather
_HOOK.__signature__ = inspect.signature(_HOOK)
