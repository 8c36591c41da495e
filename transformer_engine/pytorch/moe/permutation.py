"""Sorting tokens by expert, and back: the two ends of a mixture of experts.

All functions are compositions of torch operations, on any device. They do not wait for a GPU if the
number of rows is given. `row_id_map`, which `moe_permute` and similar functions return beside the
rows, is int64 `[rows, 2]`: for each row, the token and the column of the routing map that it stands
for. Callers only pass it on to `moe_unpermute`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import (
    can_read,
    check_devices,
    check_integers,
    check_plain,
    check_tensors,
)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

__all__ = ["moe_permute", "moe_permute_with_probs", "moe_unpermute"]


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each token once for each of its experts, sorted by expert, then by token.

    Args:
        inp: `[tokens, hidden]`.
        routing_map: with `map_type="mask"`, bool or 0 and 1 `[tokens, experts]`; with `"index"`,
            numbers of experts `[tokens, topk]`; a number above those of all experts puts its row
            last, where `num_out_tokens` may leave it out.
        num_out_tokens: number of rows. With a mask it must be the number of ones; with indices,
            further rows are left out. None or below 1: all; with a mask the host waits for them.
        max_token_num: has no effect.
        map_type: `"mask"` or `"index"`.

    Returns:
        `(rows [num_out_tokens, hidden], row_id_map)`.

    Raises:
        ValueError: shapes that do not fit, an unknown kind of map; on a CPU, a mask of other values
            than 0 and 1, `num_out_tokens` other than the number of ones, or negative indices.
        TypeError: an input in FP8; arguments that are not tensors; indices of another dtype than
            int32 or int64; `num_out_tokens` that is not an int.

    >>> tokens = torch.tensor([[1.0], [2.0]])
    >>> rows, row_id_map = moe_permute(tokens, torch.tensor([[True, True], [True, False]]), 3)
    >>> rows.flatten(), moe_unpermute(rows, row_id_map, restore_shape=tokens.shape).flatten()
    (tensor([1., 2., 1.]), tensor([2., 2.]))
    """
    check_rows(inp)
    row_id_map = _row_id_map(inp, routing_map, num_out_tokens, map_type)
    rows: torch.Tensor = _Gather.apply(inp, row_id_map[:, 0])
    return rows, row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_permute` of a mask, with the weight of each row.

    Args:
        inp: `[tokens, hidden]`.
        probs: `[tokens, experts]`.
        routing_map: bool or 0 and 1 `[tokens, experts]`.
        num_out_tokens: see `moe_permute`.

    Returns:
        `(rows [num_out_tokens, hidden], weights [num_out_tokens], row_id_map)`.

    Raises:
        ValueError: see `moe_permute`; `probs` of another shape than the map.
        TypeError: see `moe_permute`.

    >>> probs = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    >>> moe_permute_with_probs(torch.tensor([[1.0], [2.0]]), probs, probs > 0, 3)[1]
    tensor([0.2500, 1.0000, 0.7500])
    """
    check_tensors("moe_permute_with_probs", probs=probs, routing_map=routing_map)
    if probs.shape != routing_map.shape:
        raise ValueError(
            f"[moe_permute_with_probs] expected probs of shape {tuple(routing_map.shape)}, as the "
            f"routing map, got {tuple(probs.shape)}"
        )
    rows, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    return rows, _weights(probs, row_id_map), row_id_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the rows of each token in fp32, in the order of the tokens.

    On a GPU the order of the sums may differ from run to run, unless
    `torch.use_deterministic_algorithms` is on.

    Args:
        inp: `[rows, hidden]`.
        row_id_map: the result of `moe_permute`, or of a similar function.
        merging_probs: weights of the rows, of the shape of the routing map.
        restore_shape: `[tokens, hidden]`; if None, the tokens are those of `merging_probs`, and
            without weights the shape is that of `inp`.
        map_type: has no effect, because `row_id_map` has one form for both types.
        probs: older name of `merging_probs`.
        pad_offsets: from `moe_permute_and_pad_with_probs`, if `inp` has rows of padding, which are
            left out; None: there is no padding.

    Returns:
        A tensor of `restore_shape`, in the dtype of `inp`.

    Raises:
        ValueError: shapes that do not fit; weights under both names.
        TypeError: an input in FP8; arguments that are not tensors.

    >>> rows, row_id_map = moe_permute(torch.ones(2, 1), torch.ones(2, 2, dtype=torch.bool), 4)
    >>> moe_unpermute(rows, row_id_map, torch.tensor([[0.5, 0.25], [1.0, 1.0]]), [2, 1]).flatten()
    tensor([0.7500, 2.0000])
    """
    check_rows(inp)
    if probs is not None and merging_probs is not None:
        raise ValueError("[moe_unpermute] expected one of merging_probs and probs, got both")
    probs = merging_probs if probs is None else probs
    optional = {"merging_probs": probs, "pad_offsets": pad_offsets}
    optional = {name: x for name, x in optional.items() if x is not None}
    check_tensors("moe_unpermute", row_id_map=row_id_map, **optional)
    check_devices("moe_unpermute", inp=inp, row_id_map=row_id_map, merging_probs=probs)
    _check_map(row_id_map, pad_offsets)
    if pad_offsets is not None:
        inp = _without_padding(inp, row_id_map, pad_offsets, probs)
    if restore_shape is None:
        restore_shape = inp.shape if probs is None else (probs.shape[0], inp.shape[1])
    restore_shape = _as_sizes(restore_shape)
    if row_id_map.shape != (inp.shape[0], 2) or restore_shape[1:] != inp.shape[1:]:
        raise ValueError(
            f"[moe_unpermute] expected rows [{row_id_map.shape[0]}, hidden], as row_id_map says,"
            f" and restore_shape [tokens, hidden], got {tuple(inp.shape)} and"
            f" {tuple(restore_shape)}"
        )
    weighted, tokens = inp, restore_shape[0]
    if probs is not None and (probs.ndim != 2 or probs.shape[0] != tokens):
        raise ValueError(
            f"[moe_unpermute] expected merging_probs [{tokens}, ...], of the shape of the "
            f"routing map, got {tuple(probs.shape)}"
        )
    _check_places(row_id_map, tokens, probs)
    if probs is not None:
        weighted = inp.float() * _weights(probs, row_id_map)[:, None]
    return _Scatter.apply(weighted, row_id_map[:, 0], tokens, inp.dtype)


def padded_places(row_id_map: torch.Tensor, pad_offsets: torch.Tensor) -> torch.Tensor:
    """The index of each row among the padded rows: int64 `[rows]`.

    Args:
        row_id_map: from `moe_permute_with_probs`.
        pad_offsets: int64 `[experts]`, rows of padding in front of each expert's rows.
    """
    rows = torch.arange(row_id_map.shape[0], device=row_id_map.device)
    return rows + pad_offsets.to(row_id_map.device)[row_id_map[:, 1]]


def _as_sizes(shape: Any) -> tuple[int, ...]:
    """`restore_shape` as a tuple of sizes."""
    if not isinstance(shape, tuple | list):
        raise TypeError(f"[moe_unpermute] expected restore_shape [tokens, hidden], got {shape!r}")
    for size in shape:
        check_sizes("moe_unpermute", None, 0, **{"sizes of restore_shape": size})
    return tuple(shape)


def _without_padding(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    pad_offsets: torch.Tensor,
    probs: torch.Tensor | None,
) -> torch.Tensor:
    experts = pad_offsets.shape[:1] if probs is None else probs.shape[1:]
    if pad_offsets.ndim != 1 or pad_offsets.shape != experts:
        raise ValueError(
            f"[moe_unpermute] expected pad_offsets of shape {tuple(experts)}, one for each expert, "
            f"got {tuple(pad_offsets.shape)}"
        )
    if inp.shape[0] <= row_id_map.shape[0]:
        raise ValueError(
            f"[moe_unpermute] expected inp with padding, more than {row_id_map.shape[0]} rows, got "
            f"{tuple(inp.shape)}"
        )
    if can_read(row_id_map) and bool((row_id_map[:, 1] >= pad_offsets.shape[0]).any()):
        raise ValueError(
            f"[moe_unpermute] expected pad_offsets of {int(row_id_map[:, 1].max()) + 1} or more"
            f" experts, as in row_id_map, got {pad_offsets.shape[0]}"
        )
    places = padded_places(row_id_map, pad_offsets)
    if can_read(places) and bool(((places < 0) | (places >= inp.shape[0])).any()):
        raise ValueError(
            f"[moe_unpermute] expected pad_offsets that lead to the {inp.shape[0]} rows of inp, got"
            f" {pad_offsets.tolist()}"
        )
    return inp.index_select(0, places)


def _check_places(row_id_map: torch.Tensor, tokens: int, probs: torch.Tensor | None) -> None:
    """Raise ValueError for tokens or columns out of range; only `row_id_map` on a CPU is read."""
    if not can_read(row_id_map) or not row_id_map.numel():
        return
    token, column = (last + 1 for last in row_id_map.amax(0).tolist())
    columns = column if probs is None else probs.shape[1]
    if token > tokens or column > columns:
        raise ValueError(
            f"[moe_unpermute] expected weights and restore_shape of {token} or more tokens and"
            f" {column} or more columns of the routing map, got {tokens} and {columns}"
        )


def _check_map(row_id_map: torch.Tensor, pad_offsets: torch.Tensor | None) -> None:
    """Raise TypeError unless these are integers, ValueError for a map of another form."""
    for name, x in (("row_id_map", row_id_map), ("pad_offsets", pad_offsets)):
        if x is not None:
            check_integers("moe_unpermute", **{name: x})
    if row_id_map.ndim != 2 or row_id_map.shape[1] != 2:
        raise ValueError(
            "[moe_unpermute] expected row_id_map [rows, 2], as moe_permute returns it, got"
            f" {tuple(row_id_map.shape)}"
        )
    if can_read(row_id_map) and bool((row_id_map < 0).any()):
        raise ValueError(
            "[moe_unpermute] expected row_id_map of 0 or more, as moe_permute returns it, got"
            f" {row_id_map.min().item()}"
        )


def check_rows(inp: torch.Tensor) -> None:
    """Raise unless the input is a plain tensor `[rows, hidden]`."""
    check_tensors("permutation", inp=inp)
    check_plain("permutation", inp=inp)
    if inp.ndim != 2:
        raise ValueError(f"[permutation] expected inp [rows, hidden], got {tuple(inp.shape)}")


def _row_id_map(
    inp: torch.Tensor, routing_map: torch.Tensor, rows: int | None, map_type: str
) -> torch.Tensor:
    if map_type not in ("mask", "index"):
        raise ValueError(f"[moe_permute] expected map_type 'mask' or 'index', got {map_type!r}")
    check_tensors("moe_permute", routing_map=routing_map)
    check_devices("moe_permute", inp=inp, routing_map=routing_map)
    if routing_map.ndim != 2 or routing_map.shape[0] != inp.shape[0]:
        raise ValueError(
            f"[moe_permute] expected a routing map of {inp.shape[0]} tokens, got "
            f"{tuple(routing_map.shape)}"
        )
    tokens, columns = routing_map.shape
    if map_type == "mask":
        _check_mask(routing_map)
    if rows is not None:
        check_sizes("moe_permute", None, -sys.maxsize, num_out_tokens=rows)
    known_rows = rows is not None and rows > 0
    if map_type == "index":
        if routing_map.dtype not in (torch.int32, torch.int64):
            got = routing_map.dtype
            raise TypeError(f"[moe_permute] expected int32 or int64 with 'index', got {got}")
        if can_read(routing_map) and bool((routing_map < 0).any()):
            raise ValueError(
                "[moe_permute] expected numbers of experts of 0 or more, got"
                f" {routing_map.min().item()}, whose rows would come first; to leave rows out, give"
                " them a number above those of all experts, and num_out_tokens"
            )
        places = routing_map.flatten().argsort(stable=True)[: rows if known_rows else None]
        return torch.stack([places // columns, places % columns], 1)
    chosen = routing_map.bool()
    if not known_rows or can_read(routing_map):
        ones = int(chosen.sum())
        if known_rows and rows != ones:
            raise ValueError(
                f"[moe_permute] expected num_out_tokens={ones}, the ones of the mask, got {rows}"
            )
        rows = ones
    # The stable sort puts the ones of the mask first, in order of experts, then of tokens.
    places = (~chosen).t().flatten().byte().argsort(stable=True)[:rows]
    return torch.stack([places % tokens, places // tokens], 1)


def _check_mask(routing_map: torch.Tensor) -> None:
    """Raise ValueError for other values than 0 and 1, such as indices. Only the CPU's are read."""
    if routing_map.dtype is torch.bool or not can_read(routing_map):
        return
    if bool(((routing_map != 0) & (routing_map != 1)).any()):
        raise ValueError(
            "[moe_permute] expected a routing map of 0 and 1 with map_type 'mask', got values from"
            f" {routing_map.min().item()} to {routing_map.max().item()}; indices of experts are of"
            " map_type 'index'"
        )


def _weights(probs: torch.Tensor, row_id_map: torch.Tensor) -> torch.Tensor:
    tokens, columns = row_id_map.unbind(1)
    return probs.flatten().gather(0, tokens * probs.shape[1] + columns)


class _Gather(torch.autograd.Function):
    """Copies tokens to rows; the backward sums the gradients of each token's rows in fp32."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.count, ctx.dtype = inp.shape[0], inp.dtype
        return inp.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        return _Scatter.apply(grad, tokens, ctx.count, ctx.dtype), None


class _Scatter(torch.autograd.Function):
    """Sums the rows of each token in fp32; the backward copies gradients to rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, count: int, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.dtype = rows.dtype
        sums = torch.zeros(count, rows.shape[1], dtype=torch.float32, device=rows.device)
        sums.index_add_(0, tokens, rows.float())
        # A copy in fp32, too, see `gather_rows` of attention.
        return sums.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        gathered: torch.Tensor = _Gather.apply(grad, tokens)
        return gathered.to(ctx.dtype), None, None, None
