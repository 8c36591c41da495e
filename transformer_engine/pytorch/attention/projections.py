"""How the output of a fused projection holds queries, keys and values: everything here is a view.

    interleaved       [groups, queries per group + 2, size]    each group: its queries, key, value
    not interleaved   [heads, size], [groups, size], [groups, size]

Going back, gradients that are such views themselves (cuDNN writes them so) are one tensor already;
others are concatenated once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.functions import apply_of, once_differentiable
from transformer_engine.pytorch.kernels.packed import whole_of


class HeadLayout(NamedTuple):
    """Heads of a projection, and whether each group's are together."""

    heads: int
    groups: int
    size: int
    interleaved: bool

    @property
    def query_features(self) -> int:
        """Features of all queries."""
        return self.heads * self.size

    @property
    def all_views(self) -> bool:
        """Whether queries, too, are a view: interleaved ones of several groups have no stride."""
        return self.heads == self.groups or not self.interleaved

    @property
    def key_features(self) -> int:
        """Features of all keys, which is also those of all values."""
        return self.groups * self.size


class _Split(torch.autograd.Function):
    """Not for queries of several groups, which `views` copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
        ctx.shape, ctx.layout = x.shape, layout
        return views(x, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return join_gradients(gradients, ctx.shape, ctx.layout), None


_apply = apply_of(_Split)


def join_gradients(
    gradients: tuple[Any, ...], shape: torch.Size, layout: HeadLayout
) -> torch.Tensor:
    """The gradient, of this shape, of the tensor whose parts have these gradients."""
    if not layout.all_views:
        query, key, value = gradients
        query = query.unflatten(-2, (layout.groups, -1))
        return torch.cat((query, key.unsqueeze(-2), value.unsqueeze(-2)), -2).view(shape)
    whole = whole_of(gradients, by_head=layout.interleaved)
    if whole is not None:
        return whole
    join = torch.stack if layout.interleaved else torch.cat
    return join(gradients, -2).view(shape)


def split_qkv(x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
    """Query `[..., heads, size]`, key and value `[..., groups, size]` of `[..., features]`."""
    recorded = x.requires_grad and torch.is_grad_enabled() and x.is_contiguous()
    if not (layout.all_views and recorded) or torch.compiler.is_compiling():
        return views(x, layout)
    parts: tuple[torch.Tensor, ...] = _apply(x, layout)
    return parts


def views(x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
    """The same without what autograd gains from `split_qkv`."""
    heads, groups, size, interleaved = layout
    lead = x.shape[:-1]
    if heads == groups:  # one view and one op, whose backward is one op, too
        if interleaved:
            return x.view(*lead, heads, 3, size).unbind(-2)
        return x.view(*lead, 3, heads, size).unbind(-3)
    if not interleaved:
        parts = x.split((layout.query_features, layout.key_features, layout.key_features), dim=-1)
        of_each = (heads, groups, groups)
        return tuple(p.view(*lead, n, size) for p, n in zip(parts, of_each, strict=True))
    per_group = heads // groups
    query, key, value = x.view(*lead, groups, per_group + 2, size).split((per_group, 1, 1), -2)
    # The heads of several groups of queries have no single stride: this copies the queries.
    return query.reshape(*lead, heads, size), key.squeeze(-2), value.squeeze(-2)


def split_kv(x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
    """Key and value `[..., groups, size]` of `[..., features]`."""
    shape = (layout.groups, 2) if layout.interleaved else (2, layout.groups)
    pair = x.view(*x.shape[:-1], *shape, layout.size)
    return pair.unbind(-2 if layout.interleaved else -3)
