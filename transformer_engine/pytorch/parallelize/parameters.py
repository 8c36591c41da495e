"""Conversion between whole parameters and the parts that a rank has of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from transformer_engine.pytorch.parallel.dtensors import dtensors, is_dtensor
from transformer_engine.pytorch.parallel.exchange import all_gather_stack
from transformer_engine.pytorch.parallel.shards import Shard
from transformer_engine.pytorch.tensor.shards import piece_of, with_piece


class Held(NamedTuple):
    """A parameter of a rank.

    Attributes:
        name: the name in the model.
        parameter: the rank's parameter; a DTensor after `fully_shard`.
        shard: which part of the whole parameter it is among tensor parallel ranks; None if they do
            not divide it.
    """

    name: str
    parameter: nn.Parameter
    shard: Shard | None


def held(model: nn.Module) -> Iterator[Held]:
    """Every parameter of a model once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        specs = getattr(module, "_parameter_set", None)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            spec = specs.spec(name) if specs is not None else None
            shard = spec.shard if spec is not None else None
            shard = shard if shard is not None and shard.ranks.size > 1 else None
            yield Held(f"{path}.{name}" if path else name, parameter, shard)


def gather_whole(x: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """The whole tensor of which every rank has a part; all ranks must call this."""
    piece = piece_of(x)
    if piece is not None:
        x = with_piece(x, piece.dequantize())
    if is_dtensor(x):
        placements = [*x.placements]
        for i in reversed(range(len(placements))):
            placements[i] = dtensors().Replicate()
            x = x.redistribute(placements=placements)
        x = x.to_local()
    return x if shard is None else shard.whole(all_gather_stack(x, shard.ranks.check()))


def part_like(whole: torch.Tensor, shard: Shard | None, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, divided as `like` is; there is no communication."""
    if shard is not None:
        rank = shard.ranks.rank
        assert rank is not None
        whole = shard.of(whole, rank)
    whole = whole.to(like.device)
    if not is_dtensor(like):
        return whole
    return dtensors().distribute_tensor(
        whole, like.device_mesh, like.placements, src_data_rank=None
    )


def gather_parameter(model: nn.Module, name: str, x: torch.Tensor | None = None) -> torch.Tensor:
    """The whole of a parameter, or of a tensor that is divided like it; all ranks must call this.

    Args:
        model: the model, also after `parallelize` and `fully_shard`.
        name: the name of the parameter in the model.
        x: the parameter's gradient, or an optimizer's state of it; None for its value.

    Returns:
        The tensor as one process would have it.

    Raises:
        KeyError: no parameter has this name.

    >>> gather_parameter(nn.Linear(4, 2), "bias").shape
    torch.Size([2])
    """
    one = _named(model, name)
    return gather_whole(one.parameter.detach() if x is None else x, one.shard)


def shard_parameter(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, divided like a parameter.

    Args:
        model: the model, also after `parallelize` and `fully_shard`.
        name: the name of the parameter in the model.
        whole: the whole tensor, of the parameter's size in one process; the same on every rank.

    Returns:
        The part; a DTensor after `fully_shard`.

    Raises:
        KeyError: no parameter has this name.

    >>> shard_parameter(nn.Linear(4, 2), "bias", torch.ones(2))
    tensor([1., 1.])
    """
    one = _named(model, name)
    return part_like(whole, one.shard, one.parameter)


def _named(model: nn.Module, name: str) -> Held:
    found = next((one for one in held(model) if one.name == name), None)
    if found is None:
        raise KeyError(f"[parallelize] expected the name of a parameter, got {name!r}")
    return found


def cut_evenly(whole: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A DTensor of a whole tensor, divided along dimension 0 among all ranks, without sending."""
    return dtensors().distribute_tensor(
        whole, mesh, [dtensors().Shard(0)] * mesh.ndim, src_data_rank=None
    )
