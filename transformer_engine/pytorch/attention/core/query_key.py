"""What happens to queries and keys between their projection and attention: norms, rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from transformer_engine.pytorch.attention.core.formats import sequence_dim
from transformer_engine.pytorch.attention.core.projections import HeadLayout
from transformer_engine.pytorch.attention.rope.embedding import (
    Rope,
    angle_table,
    check_freqs,
    check_positions,
)
from transformer_engine.pytorch.attention.rope.ranks import angles_of_rank, sequences_of_rank
from transformer_engine.pytorch.chain.chain import Chain, ChainBuilder
from transformer_engine.pytorch.chain.flow import Flow
from transformer_engine.pytorch.chain.part import Incoming, Part, Planned, incoming
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.kernels.rope import rope
from transformer_engine.pytorch.module.l2norm import L2Normalization
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

if TYPE_CHECKING:
    from transformer_engine.pytorch.attention.context.group import ContextGroup
    from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention

_Parameters = tuple[torch.Tensor | None, ...]
RotaryAngles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm, "L2Normalization": L2Normalization}


def head_norms(
    attention: MultiheadAttention,
    kind: str | None,
    eps: float,
    params_dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms of queries and of keys, over the elements of each head.

    Both are None if `kind` is None, and the same module if it has no parameters.
    """
    if kind is None:
        return None, None
    layer, size = attention.name, attention.layout.size
    norm = _NORMS.get(kind)
    if norm is None:
        raise ValueError(
            f"[MultiheadAttention] expected qk_norm_type None or in {{{', '.join(_NORMS)}}},"
            f" got {kind!r} (layer {layer})"
        )
    if norm is L2Normalization:
        shared = L2Normalization(size, eps)
        return shared, shared
    query, key = (
        norm(size, eps, params_dtype=params_dtype, device=device, name=f"{layer}.{name}")
        for name in ("q_norm", "k_norm")
    )
    if attention.proj.ranks.size > 1:
        query.ranks_with_other_heads = key.ranks_with_other_heads = attention.proj.ranks
    return query, key


class Rank(NamedTuple):
    """A context parallel rank, which has some tokens of each sequence.

    Attributes:
        rank: number of the rank.
        ranks: number of ranks.
    """

    rank: int = 0
    ranks: int = 1

    def parameters(
        self, whole: _Parameters, qkv_format: str, leads: Sequence[torch.Size]
    ) -> _Parameters:
        """Angles, starts and ends for this rank's queries and keys, from those of all tokens."""
        table, starts, ends, key_table, key_starts, key_ends = whole
        place = (self.ranks, self.rank)
        assert table is not None and key_table is not None
        if qkv_format == "thd":
            assert ends is not None and key_ends is not None
            own = sequences_of_rank(ends, starts, *place)
            of_keys = own if key_ends is ends else sequences_of_rank(key_ends, key_starts, *place)
            return table, own[1], own[0], key_table, of_keys[1], of_keys[0]
        dim = sequence_dim(qkv_format)
        lengths = [lead[dim] for lead in leads]
        angles = angles_of_rank(table, lengths[0], starts, *place)
        same = key_table is table and lengths[0] == lengths[1]
        key_angles = angles if same else angles_of_rank(key_table, lengths[1], key_starts, *place)
        return angles, None, None, key_angles, None, None


class Rotation(Part):
    """Rotary position embedding of queries and keys.

    Args:
        layout: heads and their size.
        qkv_format: of queries and keys.
        interleaved: see `rope/embedding.py`.
        cross: attention is cross attention: `inference_params` knows the positions of queries, but
            not of keys.

    Attributes:
        of_projection: the same rotation for a projection that is not split yet.
    """

    def __init__(self, layout: HeadLayout, qkv_format: str, interleaved: bool, cross: bool) -> None:
        built = ChainBuilder("query", "key")
        super().__init__(built.chain(*built.add(Rope(), 0), *built.add(Rope(), 1)))
        self.layout = layout
        self.qkv_format = qkv_format
        self.interleaved = interleaved
        self.cross = cross
        self.of_projection = ProjectionRotation(self)
        self.set_context(None)

    @staticmethod
    def arguments(angles: Any, others: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of this part, from those of a call of the layer; empty without angles."""
        if angles is None:
            return ()
        names = ("cu_seqlens_q", "cu_seqlens_kv")
        lengths = [others.get(name) for name in names]
        ends = [others.get(f"{name}_padded", others.get(name)) for name in names]
        return angles, *ends, others.get("inference_params"), *lengths

    def set_context(self, context: ContextGroup | None) -> None:
        """Rotate by the positions of this rank's tokens, if context parallel ranks share them."""
        self.rank = Rank() if context is None else Rank(context.rank, context.size)

    def plan_call(
        self,
        values: Incoming,
        angles: RotaryAngles,
        query_ends: torch.Tensor | None = None,
        key_ends: torch.Tensor | None = None,
        inference_params: Any = None,
        *lengths: torch.Tensor | None,
    ) -> Planned:
        """See `Part`; the arguments are those of `apply_rotary_pos_emb`, for queries and keys.

        `lengths` are `cu_seqlens` of both without padding.
        """
        query, key = values.likes
        heads, groups, size, _ = self.layout
        pair = _pair_of(angles)
        starts = key_starts = None
        if inference_params is not None:
            cached, starts, ends = inference_params.positions(
                pair, query, self.qkv_format, id(self)
            )
            pair = (cached[0], pair[1]) if self.cross else cached
            key_starts = None if self.cross else starts
            if ends is not None:  # those of the cache replace the caller's cu_seqlens
                query_ends, key_ends = ends, key_ends if self.cross else ends
        leads = [like.shape[: 1 if self.qkv_format == "thd" else 2] for like in (query, key)]
        ranks = self.rank.ranks
        check_freqs((*leads[0], heads, size), pair[0], self.qkv_format, query_ends, ranks)
        check_freqs((*leads[1], groups, size), pair[1], self.qkv_format, key_ends, ranks)
        if self.qkv_format != "thd":
            query_ends = key_ends = None
        elif starts is None:
            for one, cu_seqlens in zip(pair, lengths, strict=False):
                check_positions(one, cu_seqlens)
        table = angle_table(pair[0])
        key_table = table if pair[1] is pair[0] else angle_table(pair[1])
        parameters: _Parameters = (table, starts, query_ends, key_table, key_starts, key_ends)
        if ranks > 1:
            parameters = self.rank.parameters(parameters, self.qkv_format, leads)
        return self.planned(values, parameters, (self.qkv_format == "bshd", self.interleaved))

    def __call__(self, query: torch.Tensor, key: torch.Tensor, *arguments: Any) -> Any:
        """Rotate both. With `inference_params`, one launch does it if both are in one tensor."""
        cached = len(arguments) > 3 and arguments[3] is not None and not torch.is_grad_enabled()
        both = None
        if cached:
            angles, key_angles = _pair_of(arguments[0])
            both = _side_by_side(query, key) if angles is key_angles else None
        if both is None:
            return super().__call__(query, key, *arguments)
        _, parameters = self.plan_call(incoming(query, key), *arguments)
        table, starts, ends, key_table, _, key_ends = parameters
        if table is None or table is not key_table or ends is not key_ends:
            return super().__call__(query, key, *arguments)
        both = rope(both, table, starts, ends, self.qkv_format == "bshd", self.interleaved, False)
        return both.split((query.shape[-2], key.shape[-2]), -2)


class ProjectionRotation(Part):
    """Rotary position embedding of a fused projection `[..., features]`.

    Queries and keys are rotated, values are copied into the result. So the parts of the result are
    still parts of one tensor. This frees the memory of the unrotated projection, and gradients of
    the parts are joined without a copy. Results are bit for bit those of `one`, the `Rotation` of
    the same layer.
    """

    def __init__(self, one: Rotation) -> None:
        super().__init__(Chain.of(Rope(one.layout.size, *one.layout.rotated)))
        self.one = one

    def takes(self, arguments: tuple[Any, ...]) -> bool:
        """Whether this part can do what `Rotation` does with these arguments.

        The answer is no while a flow lists its parts, and passes placeholders as arguments.
        """
        if not arguments or exporting() or not self.one.layout.all_views:
            return False
        angles, query_ends, key_ends, inference_params, *_ = arguments
        alike = type(angles) is torch.Tensor and query_ends is key_ends
        return alike and inference_params is None

    def plan_call(
        self,
        values: Incoming,
        angles: torch.Tensor,
        ends: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> Planned:
        """See `Part`; the arguments are those of `Rotation`, for queries and keys alike."""
        one, like = self.one, values.like
        lead, ranks = like.shape[:-1], one.rank.ranks
        sizes = (*lead, one.layout.heads, one.layout.size)
        check_freqs(sizes, angles, one.qkv_format, ends, ranks)
        if one.qkv_format == "thd":
            check_positions(angles, lengths)
        else:
            ends = None
        table = angle_table(angles)
        parameters: _Parameters = (table, None, ends)
        if ranks > 1:
            parameters = one.rank.parameters(
                (*parameters, *parameters), one.qkv_format, [lead, lead]
            )[:3]
        return self.planned(values, parameters, (one.qkv_format == "bshd", one.interleaved))


def _pair_of(angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of queries and of keys."""
    pair = tuple(angles) if isinstance(angles, tuple | list) else (angles, angles)
    if len(pair) != 2:
        raise ValueError(
            "[MultiheadAttention] expected rotary_pos_emb to be a tensor or a pair for queries and"
            f" keys, got {len(pair)} entries"
        )
    for one in pair:
        if not isinstance(one, torch.Tensor):
            raise TypeError(
                "[MultiheadAttention] expected rotary_pos_emb to be a tensor or a pair of tensors,"
                f" got {type(one).__name__}"
            )
    return pair


def _side_by_side(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Queries and keys as heads of one tensor, if their memory is that of a fused projection."""
    shape, strides = query.shape, query.stride()
    adjacent = (
        strides == key.stride()
        and strides[-2] == shape[-1]
        and key.dtype is query.dtype
        and key.data_ptr() == query.data_ptr() + shape[-2] * shape[-1] * query.itemsize
        and key.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
    )
    if not adjacent:
        return None
    return query.as_strided((*shape[:-2], shape[-2] + key.shape[-2], shape[-1]), strides)


def normalized_heads(flow: Flow, modules: dict[str, Any], query: Any, key: Any) -> tuple[Any, Any]:
    """Query and key after the norms of `head_norms`, if the layer has them."""
    if modules.get("q_norm") is None or modules.get("k_norm") is None:
        return query, key
    return flow.call(modules["q_norm"], query), flow.call(modules["k_norm"], key)
