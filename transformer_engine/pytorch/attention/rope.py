"""Rotary position embedding: pairs of elements of a query or key, turned by position * frequency.

    y = x * cos(angle) + rotate_half(x) * sin(angle)

The pairs are (i, i + size / 2), or with `interleaved` (2 i, 2 i + 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch._torch_private import (
    apply_of,
    once_differentiable,
    transforms_active,
)
from transformer_engine.pytorch.export.onnx import exporting
from transformer_engine.pytorch.kernels.rope import rope
from transformer_engine.pytorch.module.arguments import check_numbers, check_sizes
from transformer_engine.pytorch.module.parameters import default_device


class RotaryPositionEmbedding(nn.Module):
    """The angle of each position and element.

    Args:
        dim: size of a head.
        rotary_percent: share of the size that is turned.
        seq_len_interpolation_factor: positions are divided by it.
        pretrained_max_position_embeddings: sequences longer than this times the factor have their
            positions divided by sequence length / this instead.
        rotary_base: the lowest frequency is about 1 / rotary_base.
        interleaved: pairs that turn together are neighbours, (0, 1), (2, 3), ..., and not elements
            of the two halves, (0, dim / 2), (1, dim / 2 + 1), ...

    Raises:
        ValueError: an odd number of elements to turn; a share or factor that cannot be.

    Example:
        >>> RotaryPositionEmbedding(64)(16).shape
        torch.Size([16, 1, 1, 64])
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("RotaryPositionEmbedding", None, dim=dim)
        check_numbers("RotaryPositionEmbedding", None, rotary_percent=rotary_percent)
        factor = seq_len_interpolation_factor
        if not 0.0 < rotary_percent <= 1.0 or (factor is not None and not factor > 0.0):
            raise ValueError(
                "[RotaryPositionEmbedding] expected rotary_percent in (0, 1] and"
                f" seq_len_interpolation_factor > 0 or None, got {rotary_percent} and {factor}"
            )
        self.dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"[RotaryPositionEmbedding] expected an even number of elements to turn,"
                f" got {self.dim} of dim={dim}"
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        frequencies = self._frequencies(default_device(None))
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        step = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        return 1.0 / (self.rotary_base ** (step / self.dim))

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles of the positions from `offset` on, fp32 `[max_seq_len, 1, 1, dim]`.

        They are fp32 also after `module.half()`: the frequencies are computed anew.

        Args:
            max_seq_len: how many positions.
            offset: the first one.
        """
        device = self.inv_freq.device
        position = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        position = position / self._interpolation(max_seq_len)
        angle = position[:, None] * self._frequencies(device)
        if self.interleaved:
            angle = angle.repeat_interleave(2, dim=-1)
        else:
            angle = torch.cat((angle, angle), dim=-1)
        return angle[:, None, None, :]

    def _interpolation(self, max_seq_len: int) -> float:
        """What positions are divided by."""
        factor = self.seq_len_interpolation_factor
        if factor is None:
            return 1.0
        pretrained = self.pretrained_max_position_embeddings
        if pretrained is not None and max_seq_len > pretrained * factor:
            return max_seq_len / pretrained
        return float(factor)


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
    """Turn the first elements of each head, as many as `freqs` has, and pass on the rest.

    Args:
        t: `[sequence, batch, heads, size]`, or as `tensor_format` says.
        freqs: angles `[positions, 1, 1, elements]`; tokens behind the last position, as padding
            may be, have the angles of the last.
        tensor_format: `sbhd`, `bshd` or `thd`.
        fused: by one kernel, in fp32 and rounded once; otherwise in the dtype of `t`.
        cu_seqlens: int32 `[batch + 1]`, where each sequence of `thd` ends.
        start_positions: int32 `[batch]`, the position of each sequence's first token.
        interleaved: which elements are a pair.
        cp_size: context parallel ranks, 1 so far.
        cp_rank: this rank among them.

    Raises:
        ValueError: shapes that do not fit together; sequences without start positions that are
            longer than `freqs`.
        TypeError: `t` or `freqs` is no tensor.
    """
    if cp_size != 1 or cp_rank != 0:
        raise NotImplementedError(
            f"[apply_rotary_pos_emb] cp_size={cp_size}: context parallelism is not implemented yet"
        )
    _check_dimensions(t, freqs, tensor_format)
    positions, turned_size = freqs.shape[0], freqs.shape[-1]
    if turned_size > t.shape[-1] or turned_size % 2:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected freqs of at most {t.shape[-1]} elements, an even"
            f" number, got {turned_size}"
        )
    _check_format(t, freqs, tensor_format, cu_seqlens)
    if fused and not exporting():
        packed = cu_seqlens if tensor_format == "thd" else None
        batch_first = tensor_format == "bshd"
        arguments = (_table(freqs), start_positions, packed)
        recorded = t.requires_grad and torch.is_grad_enabled()
        if recorded or transforms_active():
            return _apply(t, *arguments, batch_first, interleaved)
        return _by_kernel(t, *arguments, batch_first, interleaved, False)
    freqs = freqs.view(positions, 1, 1, turned_size)
    angle = _angles(t, freqs, tensor_format, cu_seqlens, start_positions)
    if fused:
        return _turned(t.float(), angle, interleaved).to(t.dtype)
    return _turned(t, angle, interleaved)


def turn_back(
    grad: torch.Tensor, freqs: torch.Tensor, tensor_format: str, interleaved: bool
) -> torch.Tensor:
    """The gradient of what was turned `fused`, sequences from position 0, from that of the result.

    Args:
        grad: of the result, as `tensor_format` says; not `thd`.
        freqs: see `apply_rotary_pos_emb`.
        tensor_format: see `apply_rotary_pos_emb`.
        interleaved: see `apply_rotary_pos_emb`.
    """
    return _by_kernel(grad, _table(freqs), None, None, tensor_format == "bshd", interleaved, True)


def _table(freqs: torch.Tensor) -> torch.Tensor:
    """Angles as the kernel reads them, `[positions, elements]`."""
    plain = freqs.dtype is torch.float32 and freqs.is_contiguous()  # each call of torch counts
    table = freqs if plain else freqs.to(torch.float32).contiguous()
    return table.view(freqs.shape[0], freqs.shape[-1])


def _turned(t: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
    head, rest = t[..., : angle.shape[-1]], t[..., angle.shape[-1] :]
    turned = head * cos + _rotate_half(head, interleaved) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class _Turn(torch.autograd.Function):
    """The kernel; its gradient is turned back by the same angles."""

    @staticmethod
    def forward(
        ctx: Any,
        t: torch.Tensor,
        table: torch.Tensor,
        starts: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        batch_first: bool,
        interleaved: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(table, starts, cu_seqlens)
        ctx.how = (batch_first, interleaved)
        return _by_kernel(t, table, starts, cu_seqlens, batch_first, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        table, starts, cu_seqlens = ctx.saved_tensors
        batch_first, interleaved = ctx.how
        turned = _by_kernel(grad, table, starts, cu_seqlens, batch_first, interleaved, True)
        return turned, *[None] * 5


_apply = apply_of(_Turn)


def _by_kernel(x: torch.Tensor, *how: Any) -> torch.Tensor:
    """`kernels.rope.rope`, which wants the elements of a head side by side."""
    return rope(x if x.stride(-1) == 1 else x.contiguous(), *how)


def _rotate_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _check_dimensions(t: torch.Tensor, freqs: torch.Tensor, tensor_format: str) -> None:
    for name, given in (("t", t), ("freqs", freqs)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(
                f"[apply_rotary_pos_emb] expected {name} to be a torch.Tensor, got"
                f" {type(given).__name__}"
            )
    dimensions = 3 if tensor_format == "thd" else 4
    if t.dim() != dimensions:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected t of {dimensions} dimensions for tensor_format"
            f" {tensor_format!r}, got {tuple(t.shape)}"
        )
    if freqs.dim() < 2 or any(size != 1 for size in freqs.shape[1:-1]):
        raise ValueError(
            "[apply_rotary_pos_emb] expected freqs of shape (positions, 1, 1, elements), got"
            f" {tuple(freqs.shape)}"
        )


def _check_format(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str,
    cu_seqlens: torch.Tensor | None,
) -> None:
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
    length = t.shape[0 if tensor_format == "sbhd" else 1]
    if length > freqs.shape[0]:
        raise ValueError(
            f"[apply_rotary_pos_emb] expected freqs for at least {length} positions,"
            f" got {freqs.shape[0]}"
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
