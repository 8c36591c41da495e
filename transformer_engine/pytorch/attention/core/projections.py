"""Splits the output of a fused projection into queries, keys and values, as views.

    interleaved       [groups, queries per group + 2, size]    each group: its queries, key, value
    not interleaved   [heads, size], [groups, size], [groups, size]

In the backward, gradients that are such views of one tensor (cuDNN and flash-attn write them so)
are joined without a copy; others are concatenated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import apply_of, once_differentiable
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.part import Incoming, Part, Planned
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.kernels.library import composite_op
from transformer_engine.pytorch.kernels.packed import packed_base
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.parallel.groups import TensorParallel

_PACK = 16  # bytes that one instruction moves


class HeadLayout(NamedTuple):
    """The heads of a projection, and whether queries, key and value of a group are neighbours."""

    heads: int
    groups: int
    size: int
    interleaved: bool

    def shared(self, ranks: TensorParallel) -> HeadLayout:
        """The heads of one rank. Raises ValueError if the ranks cannot share them equally."""
        heads = ranks.share("num_attention_heads", self.heads)
        return self._replace(heads=heads, groups=ranks.share("num_gqa_groups", self.groups))

    def split(self, fused: bool) -> Any:
        """`parameters_split` of the projection of queries, keys and values, see `Linear`."""
        sizes = {"query": self.query_features, "key": self.key_features, "value": self.key_features}
        if not fused:
            return sizes
        return None if self.interleaved else [*sizes.values()]

    @property
    def query_features(self) -> int:
        """Features of all queries."""
        return self.heads * self.size

    @property
    def rotated(self) -> tuple[int, int]:
        """`period` and `rotated` of the stage `Rope`: rotated heads are queries and keys."""
        if self.interleaved:
            period = self.heads // self.groups + 2
            return period, period - 1
        return self.heads + 2 * self.groups, self.heads + self.groups

    @property
    def all_views(self) -> bool:
        """Whether queries are a view, too.

        If they are interleaved and a group has several query heads, the distance between heads is
        not constant, so that no stride describes them.
        """
        return self.heads == self.groups or not self.interleaved

    @property
    def key_features(self) -> int:
        """Features of all keys, which is also those of all values."""
        return self.groups * self.size


def layout_of_heads(
    layer: Any, heads: int, groups: int | None, size: int | None, interleaved: bool
) -> HeadLayout:
    """The heads of a `MultiheadAttention`, after checks of its sizes; None is for a default."""
    groups = heads if groups is None else groups
    check_sizes("MultiheadAttention", layer.name, hidden_size=layer.hidden_size)
    sizes = {"num_attention_heads": heads, "num_gqa_groups": groups, "kv_channels": size or 1}
    check_sizes("MultiheadAttention", layer.name, 1, **sizes, layer_number=layer.layer_number)
    if not size and layer.hidden_size % heads:
        raise ValueError(
            "[MultiheadAttention] expected hidden_size divisible by num_attention_heads,"
            f" {layer.hidden_size} is not divisible by {heads} (layer {layer.name})"
        )
    return HeadLayout(heads, groups, size or layer.hidden_size // heads, interleaved)


class _Split(torch.autograd.Function):
    """`views` with `join_gradients` as its backward, for layouts whose parts are all views."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
        ctx.layout = layout
        return views(x, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return join_gradients(gradients, ctx.layout), None


def _whole_in_graph(gradients: tuple[torch.Tensor, ...], by_head: bool) -> torch.Tensor | None:
    """`packed_base` for tensors of a trace: they have no memory, and their sizes may be symbols."""
    whole: Any = gradients[0]._base
    if whole is None or any([x._base is not whole for x in gradients]):
        return None
    layout = layout_of(*gradients)
    if layout is None or layout.interleaved is not by_head or whole.dim() != gradients[0].dim() - 1:
        return None
    parts = views(whole, layout)
    is_match = all(
        x.stride() == part.stride() and x.storage_offset() == part.storage_offset()
        for x, part in zip(gradients, parts, strict=True)
    )
    return whole if is_match and whole.is_contiguous() else None


_apply = apply_of(_Split)


def join_gradients(gradients: tuple[Any, ...], layout: HeadLayout) -> torch.Tensor:
    """The gradient of a projection, from the gradients of its parts."""
    if layout.all_views:
        find = packed_base if type(gradients[0]) is torch.Tensor else _whole_in_graph
        whole = find(gradients, by_head=layout.interleaved)
        if whole is not None:
            return whole
    dtype, parts = gradients[0].dtype, in_packs(*gradients)
    if not layout.interleaved:
        return out_of_packs(torch.cat(parts, -2), dtype).flatten(-2)
    query, key, value = parts
    query = query.unflatten(-2, (layout.groups, -1))
    whole = torch.cat((query, key.unsqueeze(-2), value.unsqueeze(-2)), -2)
    return out_of_packs(whole, dtype).flatten(-3)


def in_packs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of the tensors with elements of 16 bytes, which torch copies many times faster.

    The tensors themselves are returned if their memory is not aligned to 16 bytes, if autograd
    records what happens to them, and in compiled code.
    """
    watched = torch.is_grad_enabled() and any([x.requires_grad for x in tensors])
    if torch.compiler.is_compiling() or watched or not all([_has_packs(x) for x in tensors]):
        return tensors
    return tuple([x.view(torch.complex128) for x in tensors])


def out_of_packs(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `in_packs`; `x` itself if that returned the tensors themselves."""
    return x if x.dtype is dtype else x.view(dtype)


def _has_packs(x: torch.Tensor) -> bool:
    plain = type(x) is torch.Tensor and not x.is_meta and not x.is_neg()
    if not plain or x.stride(-1) != 1 or x.data_ptr() % _PACK:
        return False
    return all([n * x.itemsize % _PACK == 0 for n in (x.shape[-1], *x.stride()[:-1])])


@composite_op(
    "split_qkv(Tensor(a) x, int heads, int groups, int size, bool interleaved)"
    " -> (Tensor(a), Tensor(a), Tensor(a))"
)
def _split_in_graph(x: torch.Tensor, *layout: Any) -> tuple[torch.Tensor, ...]:
    """`_Split` as an operator: Python runs it untraced, so it can find the base of the views."""
    return _apply(x, HeadLayout(*layout))


def split_qkv(x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
    """Split `[..., features]` into query, key and value.

    The query is `[..., heads, size]`, key and value are `[..., groups, size]`.
    """
    recorded = x.requires_grad and torch.is_grad_enabled() and x.is_contiguous()
    if not (layout.all_views and recorded) or exporting():
        return views(x, layout)
    if torch.compiler.is_compiling():
        return _split_in_graph(x, *layout)
    return _apply(x, layout)


def views(x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
    """The same tensors as `split_qkv`, made of torch's own views, which autograd differentiates."""
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
    (packs,) = in_packs(query)
    query = out_of_packs(packs.reshape(*lead, heads, packs.shape[-1]), x.dtype)
    return query, key.squeeze(-2), value.squeeze(-2)


def layout_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> HeadLayout | None:
    """The layout of one tensor whose parts have these strides; None if there is none."""
    heads, size = query.shape[-2:]
    groups = key.shape[-2]
    if key.shape != value.shape or key.shape[-1] != size:
        return None
    features = (heads + 2 * groups) * size
    for interleaved in (False, True) if heads == groups else (False,):
        inner = (features, 3 * size if interleaved else size, 1)
        if all([x.stride()[-3:] == inner for x in (query, key, value)]):
            return HeadLayout(heads, groups, size, interleaved)
    return None


def split_kv(x: torch.Tensor, layout: HeadLayout) -> tuple[torch.Tensor, ...]:
    """Split `[..., features]` into key and value `[..., groups, size]`."""
    shape = (layout.groups, 2) if layout.interleaved else (2, layout.groups)
    pair = x.view(*x.shape[:-1], *shape, layout.size)
    return pair.unbind(-2 if layout.interleaved else -3)


class SplitHeads(Stage):
    """Splits a projection `[..., features]` into heads `[..., heads, size]`.

    Args:
        results: names of the parts: (query, key, value), (key, value) or (query,).
        layout: number, size and order of the heads.
    """

    label = "split_heads"
    takes_strides = True
    records_with_readers = True  # torch joins the gradients that come from unrecorded stages

    def __init__(self, results: tuple[str, ...], layout: HeadLayout) -> None:
        self.results = results
        self.layout = layout

    def recordable(self, plan: CallPlan) -> bool:
        """Whether all parts are views."""
        return len(self.results) < 3 or self.layout.all_views

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts, as views if the layout allows it."""
        layout = self.layout
        if len(self.results) == 3:
            return views(x, layout)
        if len(self.results) == 2:
            return split_kv(x, layout)
        return (x.view(*x.shape[:-1], layout.heads, layout.size),)

    def forward(
        self, inputs: Values, parameters: Parameters, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """The parts."""
        return self.split(inputs[0]), Saved(())

    def backward_data(
        self, grads: Values, saved: Saved, plan: CallPlan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradient of the projection."""
        if len(self.results) == 3:
            return (join_gradients(tuple(grads), self.layout),), None
        if len(self.results) == 2:
            return (
                torch.stack(tuple(grads), -2 if self.layout.interleaved else -3).flatten(-3),
            ), None
        return (grads[0].flatten(-2),), None


class Heads(Part):
    """The stage `SplitHeads` as a `Part`; it takes the arguments of the stage."""

    def __init__(self, results: tuple[str, ...], layout: HeadLayout) -> None:
        self.stage = SplitHeads(results, layout)
        super().__init__(Chain.of(self.stage))

    def plan_call(self, values: Incoming) -> Planned:
        """See `Part`."""
        return self.planned(values, (), None)

    def __call__(self, x: torch.Tensor) -> Any:
        """The parts, with gradients for autograd; for queries, keys and values see `split_qkv`."""
        if len(self.stage.results) == 3:
            return split_qkv(x, self.stage.layout)
        parts = self.stage.split(x)
        return parts if len(parts) > 1 else parts[0]
