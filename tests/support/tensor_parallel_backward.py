"""A scenario, as in `tensor_parallel_scenarios.py`: recipes with a `backward_override`."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from backward_override import OVERRIDES, overriding, there_and_back
from peer_messages import in_parts
from tensor_parallel_ranks import column_and_row, difference

import transformer_engine.pytorch as te


def _gathered(x: torch.Tensor) -> torch.Tensor:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return torch.cat(found)


def _step(layer: Any, recipe: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Returns output, and gradients of the input and of the weight."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, layer.weight.grad]  # type: ignore[list-item]


def _check(layer: Any, recipe: Any, rank: int, tokens: int) -> None:
    column, ranks = layer.parallel_mode == "column", dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    sizes = [(tokens, 64), (tokens * ranks, 64 // ranks)]
    x, grad = [
        torch.randn(*size, generator=generator).bfloat16()
        for size in (sizes if column else sizes[::-1])
    ]
    found = _step(layer, recipe, x, grad)
    again = _step(layer, recipe, x, grad)
    assert all([torch.equal(a, b) for a, b in zip(found, again, strict=True)])
    whole, whole_grad = (_gathered(x), grad) if column else (x, _gathered(grad))
    weight = layer.weight.detach()
    if recipe.backward_override == "dequantized":
        whole = there_and_back(whole, recipe, "input")
        weight = there_and_back(weight, recipe, "weight")
    dx = whole_grad.float() @ weight.float()
    if column:
        dist.all_reduce(dx)
        dx = dx.chunk(ranks)[rank]
    about = (recipe, layer.parallel_mode)
    assert difference(found[1], dx) < 1e-2, about
    assert difference(found[2], whole_grad.float().t() @ whole.float()) < 1e-2, about


def backwards_in_high_precision(rank: int) -> None:
    """The backward reads the gathered input, or its codes, and gathered gradients, as they are."""
    overlap = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True}
    for passing, more in ((nullcontext(), {}), (in_parts(), {**overlap, "ub_name": "fc1"})):
        with passing as received:
            for name in ("current", "blocks"):
                for layer in column_and_row(**more):
                    plain = overriding(name, None)
                    for override in OVERRIDES:
                        for tokens in (32, 12):
                            _check(layer, overriding(name, override), rank, tokens)
                        x = torch.randn(32, layer.in_features).bfloat16()
                        with torch.no_grad(), te.autocast(recipe=plain):
                            expected = layer(x)
                        with torch.no_grad(), te.autocast(recipe=overriding(name, override)):
                            assert torch.equal(layer(x), expected), (name, override)
            assert received is None or received
