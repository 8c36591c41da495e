"""Rotary position embedding: rotates pairs of elements of a head by position * frequency.

    y = x * cos(angle) + rotate_half(x) * sin(angle)

If n elements of a head are rotated, pair i is (i, i + n / 2), or with `interleaved` (2 i, 2 i + 1),
and `rotate_half` maps each pair (a, b) to (-b, a).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.attention.rope.ranks import (
    angles_of_rank,
    check_rank,
    sequences_of_rank,
)
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.part import Incoming, Part, Planned
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.chain.stage_by_stage import contiguous_values
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.kernels.rope import rope
from transformer_engine.pytorch.module.inputs import (
    can_read,
    check_devices,
    check_integers,
    check_rise,
    check_tensors,
    known_lengths,
)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate the first elements of each head, as many as `freqs` has; the others are unchanged.

    Args:
        t: `[sequence, batch, heads, size]`, or as `tensor_format` says.
        freqs: angles `[positions, 1, 1, elements]`, of whole sequences. Tokens beyond the last
            position, such as padding, have the angles of the last position.
        tensor_format: `sbhd`, `bshd` or `thd`.
        fused: use one kernel, which computes in fp32, rounds once, and returns no gradient of
            `freqs`; otherwise torch's operators compute in the dtype of `t`.
        cu_seqlens: int32 `[batch + 1]`, ends of the whole sequences of `thd`, after a 0.
        start_positions: int32 `[batch]`, the position of each sequence's first token.
        interleaved: pairs are (2 i, 2 i + 1); else (i, i + elements / 2).
        cp_size: number of context parallel ranks; `t` has the tokens that `shard_sequence` gives to
            one of them.
        cp_rank: number of this rank.

    Raises:
        ValueError: shapes or devices that do not fit together; sequences without start positions
            that are longer than `freqs`; start positions below 0, and `cu_seqlens` that decrease or
            exceed the tokens (both are checked only on the CPU); with several ranks, sequences that
            cannot be cut into `2 * cp_size` chunks, and start positions with another format than
            `thd`.
        TypeError: `t` or `freqs` is no tensor, or not of floating point; `cu_seqlens` or
            `start_positions` is no tensor, or not of integers; numbers of another type.
    """
    check_rank(cp_size, cp_rank)
    check_tensors("apply_rotary_pos_emb", t=t)
    if not t.dtype.is_floating_point:
        raise TypeError(f"[apply_rotary_pos_emb] expected t of floating point, got {t.dtype}")
    check_freqs(t.shape, freqs, tensor_format, cu_seqlens, cp_size)
    if freqs.device != t.device:
        check_devices("apply_rotary_pos_emb", t=t, freqs=freqs)
    _check_integers(t, start_positions=start_positions)
    if tensor_format == "thd":
        _check_integers(t, cu_seqlens=cu_seqlens)
    if tensor_format == "thd" and cu_seqlens is not None:
        check_rise("apply_rotary_pos_emb", "cu_seqlens", cu_seqlens, t.shape[0] * cp_size)
    if start_positions is not None:
        _check_starts(start_positions, t.shape, tensor_format, cu_seqlens)
    elif tensor_format == "thd":
        check_positions(freqs, cu_seqlens)
    if cp_size > 1 and tensor_format != "thd":
        length = t.shape[0 if tensor_format == "sbhd" else 1]
        freqs = angles_of_rank(freqs, length, start_positions, cp_size, cp_rank)
    elif cp_size > 1 and cu_seqlens is not None:
        cu_seqlens, start_positions = sequences_of_rank(
            cu_seqlens, start_positions, cp_size, cp_rank
        )
    if fused:
        packed = cu_seqlens if tensor_format == "thd" else None
        options = (tensor_format == "bshd", interleaved)
        return _ROPE(t, angle_table(freqs), start_positions, packed, options)
    freqs = freqs.view(freqs.shape[0], 1, 1, freqs.shape[-1])
    angle = _angles(t, freqs, tensor_format, cu_seqlens, start_positions)
    return _rotate(t, angle, interleaved)


def angle_table(freqs: torch.Tensor) -> torch.Tensor:
    """Angles as the kernel reads them, `[positions, elements]`."""
    plain = freqs.dtype is torch.float32 and freqs.is_contiguous()  # saves three calls of torch
    plain = plain and (torch.compiler.is_compiling() or not freqs.is_neg())
    table = freqs if plain else freqs.to(torch.float32).contiguous().resolve_neg()
    return table.view(freqs.shape[0], freqs.shape[-1])


def _rotate(t: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
    head, rest = t[..., : angle.shape[-1]], t[..., angle.shape[-1] :]
    rotated = head * cos + _rotate_half(head, interleaved) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class Rope(Stage):
    """Rotates heads by the kernel, in fp32 and rounded once.

    The options of the call are (batch first, interleaved); its input is `[sequence, batch, heads,
    size]`, `[batch, sequence, heads, size]` or `[tokens, heads, size]`. The parameters are angles
    fp32 `[positions, elements]`, start positions (or None) and `cu_seqlens` (or None).

    Args:
        size: size of a head, if the last dimension of the input is `heads * size`; None if the
            input has a dimension of heads.
        period: heads are treated in groups of this many.
        rotated: the first `rotated` heads of each group are rotated, the others are copied.
    """

    label = "rope"
    takes_strides = True
    results = ("rotated",)
    parameter_count = 3

    def __init__(self, size: int | None = None, period: int = 1, rotated: int = 1) -> None:
        self.size, self.heads_of = size, (period, rotated)

    def recordable(self, plan: CallPlan) -> bool:
        """Always. If the elements of a head are not contiguous, torch copies them unrecorded."""
        return True

    def _rotated(self, t: torch.Tensor, *how: Any) -> torch.Tensor:
        if self.size is None:
            return _by_kernel(t, *how, *self.heads_of)
        heads = t.unflatten(-1, (-1, self.size))
        return _by_kernel(heads, *how, *self.heads_of).flatten(-2)

    def forward(
        self, inputs: Values, parameters: Parameters, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """Rotate."""
        parameters = contiguous_values(parameters)
        rotated = self._rotated(inputs[0], *parameters, *plan.options, False)
        return (rotated,), Saved(tuple(parameters) if plan.requires_grad else ())

    def exported(self, inputs: Values, parameters: Parameters, plan: CallPlan) -> Results:
        """The rotation in torch's operators, computed in fp32 and rounded once."""
        (t,) = inputs
        table, starts, cu_seqlens = parameters
        assert table is not None
        batch_first, interleaved = plan.options
        tensor_format = "bshd" if batch_first else "sbhd" if cu_seqlens is None else "thd"
        freqs = table.view(table.shape[0], 1, 1, table.shape[-1])
        angle = _angles(t, freqs, tensor_format, cu_seqlens, starts)
        return (_rotate(t.float(), angle, interleaved).to(t.dtype),)

    def backward_data(
        self, grads: Values, saved: Saved, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """Rotate the gradient by the same angles the other way."""
        return (self._rotated(grads[0], *saved.tensors, *plan.options, True),), (None,) * 3

    def backward_params(self, carry: Any, saved: Saved, plan: CallPlan) -> Parameters:
        """None: angles get no gradient."""
        return carry


class _RopeOfOne(Part):
    def plan_call(self, values: Incoming, *arguments: Any) -> Planned:
        *parameters, options = arguments
        return self.planned(values, parameters, options)


_ROPE = _RopeOfOne(Chain.of(Rope()))


def _by_kernel(x: torch.Tensor, *how: Any) -> torch.Tensor:
    """`kernels.rope.rope`, which needs the elements of a head to be contiguous."""
    if x.stride(-1) != 1:  # `contiguous` leaves empty tensors as they are
        x = x.contiguous() if x.numel() else x.new_empty(x.shape)
    return rope(x, *how)


def _rotate_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def check_freqs(
    sizes: Sequence[int],
    freqs: torch.Tensor,
    tensor_format: str,
    cu_seqlens: torch.Tensor | None,
    ranks: int = 1,
) -> None:
    """Raise unless angles fit a tensor of these sizes; see `apply_rotary_pos_emb`."""
    check_tensors("apply_rotary_pos_emb", freqs=freqs)
    if not freqs.dtype.is_floating_point:
        raise TypeError(
            "[apply_rotary_pos_emb] expected freqs to be angles of floating point, got"
            f" {freqs.dtype}"
        )
    dimensions = 3 if tensor_format == "thd" else 4
    if len(sizes) != dimensions:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected t of {dimensions} dimensions for tensor_format"
            f" {tensor_format!r}, got {tuple(sizes)}"
        )
    shape = freqs.shape
    if len(shape) < 2 or any(size != 1 for size in shape[1:-1]):
        raise ValueError(
            "[apply_rotary_pos_emb] expected freqs of shape (positions, 1, 1, elements), got"
            f" {tuple(shape)}"
        )
    if shape[-1] > sizes[-1] or shape[-1] % 2:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected freqs of at most {sizes[-1]} elements, an even"
            f" number, got {shape[-1]}"
        )
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(
            "[apply_rotary_pos_emb] expected tensor_format in {sbhd, bshd, thd},"
            f" got {tensor_format!r}"
        )
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError(
                "[apply_rotary_pos_emb] expected cu_seqlens with tensor_format 'thd', got None"
            )
        return
    length = sizes[0 if tensor_format == "sbhd" else 1] * ranks
    if length > shape[0]:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected freqs for at least {length} positions, got {shape[0]}"
        )


def check_positions(freqs: torch.Tensor, cu_seqlens: torch.Tensor | None) -> None:
    """Raise ValueError if a packed sequence is longer than `freqs`. Only CPU tensors are read."""
    longest = 0 if cu_seqlens is None else max(known_lengths(cu_seqlens), default=0)
    if longest > freqs.shape[0]:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected freqs for at least {longest} positions, the longest"
            f" sequence of cu_seqlens, got {freqs.shape[0]}"
        )


def _check_integers(t: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise unless these tensors are integers on the device of `t`, or None."""
    for name, x in tensors.items():
        if x is None:
            continue
        check_integers("apply_rotary_pos_emb", **{name: x})
        check_devices("apply_rotary_pos_emb", t=t, **{name: x})


def _check_starts(
    starts: torch.Tensor, sizes: Sequence[int], tensor_format: str, cu_seqlens: torch.Tensor | None
) -> None:
    batch = sizes[1 if tensor_format == "sbhd" else 0]
    if tensor_format == "thd" and cu_seqlens is not None:
        batch = cu_seqlens.shape[0] - 1
    if tuple(starts.shape) != (batch,):
        raise ValueError(
            f"[apply_rotary_pos_emb] expected start_positions of shape ({batch},), one of each"
            f" sequence, got {tuple(starts.shape)}"
        )
    if can_read(starts) and starts.numel() and int(starts.min()) < 0:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected start_positions >= 0, got {starts.tolist()[:9]}"
        )


def _angles(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str,
    cu_seqlens: torch.Tensor | None,
    start_positions: torch.Tensor | None,
) -> torch.Tensor:
    """The angle of each token, broadcastable to `t` in its format."""
    if tensor_format == "thd":
        assert cu_seqlens is not None
        return _packed_angles(t, freqs, cu_seqlens, start_positions)
    length = t.shape[0 if tensor_format == "sbhd" else 1]
    if start_positions is None:
        angle = freqs[:length]
    else:
        position = torch.arange(length, device=t.device)[:, None] + start_positions
        angle = freqs[position.clamp_(max=freqs.shape[0] - 1), 0]  # [sequence, batch, 1, elements]
    return angle if tensor_format == "sbhd" else angle.transpose(0, 1)


def _packed_angles(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_positions: torch.Tensor | None,
) -> torch.Tensor:
    token = torch.arange(t.shape[0], device=t.device)
    sequence = torch.searchsorted(cu_seqlens[1:].to(torch.int64), token, right=True)
    sequence = sequence.clamp_(max=cu_seqlens.shape[0] - 2)
    position = token - cu_seqlens[sequence]
    if start_positions is not None:
        position = position + start_positions[sequence]
    return freqs[position.clamp_(max=freqs.shape[0] - 1), 0]
