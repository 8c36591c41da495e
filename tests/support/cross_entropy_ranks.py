"""What each rank of distributed/test_cross_entropy runs."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from rank_device import here

from transformer_engine.pytorch.cross_entropy import linear_cross_entropy, parallel_cross_entropy

CLASSES = 32  # over both ranks


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits of all classes, and targets in both halves, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 5, CLASSES, generator=generator)
    target = torch.randint(CLASSES, (4, 5), generator=generator)
    target[0, :2] = -100
    return logits, target


def losses_and_gradients(rank: int) -> list[list[torch.Tensor]]:
    """Returns losses and gradients of this rank's classes, without and with label smoothing."""
    return _losses_and_gradients(rank, parallel_cross_entropy)


def compiled_losses_and_gradients(rank: int) -> list[list[torch.Tensor]]:
    """Returns the same from one compiled graph."""
    compiled = torch.compile(parallel_cross_entropy, backend="aot_eager", fullgraph=True)
    return _losses_and_gradients(rank, compiled)


def _losses_and_gradients(rank: int, loss: Callable[..., torch.Tensor]) -> list[list[torch.Tensor]]:
    group = dist.new_group([0, 1])
    found = []
    for smoothing in (0.0, 0.1):
        logits, target = problem()
        half = logits.chunk(2, dim=-1)[rank].to(here()).requires_grad_()
        losses = loss(half, target.to(here()), smoothing, False, group)
        (losses * torch.arange(20.0, device=here()).view(4, 5)).sum().backward()
        found.append([losses.detach().cpu(), half.grad.cpu()])
    return found


def projection() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs of linear_cross_entropy: hidden states, and the weight of all classes."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(4, 5, 16, generator=generator),
        torch.randn(CLASSES, 16, generator=generator),
    )


def linear_losses_and_gradients(rank: int) -> list[list[torch.Tensor]]:
    """Losses and gradients of linear_cross_entropy with this rank's half of the weight.

    The runs are: mean and losses of single tokens in eager mode, mean compiled, mean in FP8.
    """
    group = dist.new_group([0, 1])
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found = []
    for loss_of, reduction in (
        (linear_cross_entropy, "mean"),
        (linear_cross_entropy, "none"),
        (compiled, "mean"),
        (partial(linear_cross_entropy, fp8=True), "mean"),
    ):
        hidden, weight = (x.to(here()) for x in projection())
        hidden.requires_grad_()
        half = weight.chunk(2)[rank].detach().requires_grad_()
        target = problem()[1].to(here())
        losses = loss_of(
            *(hidden, half, target),
            label_smoothing=0.1,
            reduction=reduction,
            dist_process_group=group,
            chunk_tokens=8,
        )
        (
            losses * torch.arange(1.0, losses.numel() + 1, device=here()).view_as(losses)
        ).sum().backward()
        found.append([losses.detach().cpu(), hidden.grad.cpu(), half.grad.cpu()])
    return found
