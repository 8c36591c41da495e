"""Layers, recipes and data for tests of data parallelism, and their results in one process.

One process runs the micro-batches of all ranks in one autocast, so that amaxes are combined as they
are over a group. It averages the gradients of the ranks as data-parallel trainers do. The results
are bit for bit those of the ranks. One GEMM over the whole batch may round its sums differently.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_device import here
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

HIDDEN, HEADS, TOKENS, BATCH = 256, 4, 16, 4  # TOKENS and BATCH are those of all ranks
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
Model = Callable[..., torch.Tensor]


class Grouped(nn.Module):
    """Two experts; each gets half of the tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(2, HIDDEN, HIDDEN, **options)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        tokens = x.reshape(-1, HIDDEN)
        half = len(tokens) // 2
        return self.experts(tokens, [half, len(tokens) - half], **options).view(x.shape)


def _transformer(**options: Any) -> nn.Module:
    sizes = (HIDDEN, 2 * HIDDEN, HEADS)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(*sizes, **dropout, self_attn_mask_type="causal", **options)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **options: te.Linear(HIDDEN, HIDDEN, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(HIDDEN, HIDDEN, **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options),
    "GroupedLinear": Grouped,
    "TransformerLayer": _transformer,
}


# A TransformerLayer contains all other layers except GroupedLinear. On CPUs the contained layers
# run with one recipe each.
PAIRS = [
    (layer, precision)
    for precision in RECIPES
    for layer in LAYERS
    if torch.cuda.is_available()
    or layer in ("TransformerLayer", "GroupedLinear")
    or (layer, precision)
    in {("Linear", "delayed"), ("LayerNormLinear", "current"), ("LayerNormMLP", "block")}
]


def make(layer: str, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Makes a layer, with the same weights in every process."""
    torch.manual_seed(seed)
    return LAYERS[layer](params_dtype=dtype, device=here())


def micro_batch(step: int, number: int, rank: int, count: int = 1) -> torch.Tensor:
    """Returns one of a rank's `count` micro-batches, bf16 `[tokens, batch, hidden]`.

    The second rank has larger values, so that amaxes differ between the ranks.
    """
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).bfloat16()
    whole[:, BATCH // 2 :] *= 3.0
    return whole.chunk(2, dim=1)[rank].chunk(count, dim=1)[number].contiguous().to(here())


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Mean of squares."""
    return y.float().square().mean()


def alone(rank: int) -> dist.ProcessGroup:
    """Returns a group of this rank alone, over which a reduction changes nothing."""
    found: Any = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    return found


def one_process(
    model: nn.Module,
    recipe: Recipe | None,
    group: dist.ProcessGroup,
    optimizer: Any,
    steps: Sequence[int] = range(3),
    micro_batches: int = 1,
    in_fp32: bool = False,
) -> list[float]:
    """Trains on the micro-batches of both ranks; returns the mean loss of each.

    With `in_fp32`, gradients are averaged in fp32 and stored in `main_grad`.
    """
    losses, parameters = [], list(model.parameters())
    for step in steps:
        gradients: list[list[Any]] = [[None] * len(parameters) for _ in range(2)]
        for number in range(micro_batches):
            options = {} if micro_batches == 1 else {"is_first_microbatch": number == 0}
            with te.autocast(recipe is not None, recipe=recipe, amax_reduction_group=group):
                found = [
                    loss_of(model(micro_batch(step, number, rank, micro_batches), **options))
                    for rank in range(2)
                ]
            losses.append(sum(loss.item() for loss in found) / 2)
            for rank in (1, 0):  # the backward of the first call ends the step, so it runs last
                for parameter, so_far in zip(parameters, gradients[rank], strict=True):
                    parameter.grad = so_far
                found[rank].backward()
                gradients[rank] = [parameter.grad for parameter in parameters]
        for parameter, first, second in zip(parameters, *gradients, strict=True):
            if in_fp32:
                parameter.main_grad = first.float() / 2 + second.float() / 2
            else:
                parameter.grad = None if first is None else first / 2 + second / 2
        optimizer.step()
        optimizer.zero_grad()
    return losses


def one_rank(
    model: Model,
    recipe: Recipe | None,
    rank: int,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int] = range(3),
) -> list[float]:
    """Trains a wrapped model on the data of one rank; returns mean losses over the ranks."""
    losses = []
    for step in steps:
        with te.autocast(recipe is not None, recipe=recipe):
            loss = loss_of(model(micro_batch(step, 0, rank)))
        loss.backward()
        losses.append(mean_of_ranks(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def mean_of_ranks(loss: torch.Tensor) -> float:
    """Returns the mean of a loss over all ranks."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns full parameters (FP8 ones dequantised) and scaling state, by name."""
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.removeprefix("module.")] = whole.clone()
    return found


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Returns the names of values that are not equal bit for bit."""
    found, expected = values_of(model), values_of(reference)
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )
