"""What each rank of distributed/test_cross_entropy runs."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from rank_device import here

from transformer_engine.pytorch.cross_entropy import linear_cross_entropy, parallel_cross_entropy

CLASSES = 32  # of both ranks


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all classes, and targets in both halves, some ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 5, CLASSES, generator=generator)
    target = torch.randint(CLASSES, (4, 5), generator=generator)
    target[0, :2] = -100
    return logits, target


def losses_and_gradients(rank: int) -> list[list[torch.Tensor]]:
    """Of this rank's half of the classes, without and with smoothing."""
    return _losses_and_gradients(rank, parallel_cross_entropy)


def compiled_losses_and_gradients(rank: int) -> list[list[torch.Tensor]]:
    """The same in one graph."""
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
    """What linear_cross_entropy makes such logits of: hidden, and the weight of all classes."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(4, 5, 16, generator=generator),
        torch.randn(CLASSES, 16, generator=generator),
    )


def linear_losses_and_gradients(rank: int) -> list[list[torch.Tensor]]:
    """Of this rank's half of the weight: a mean and losses of single tokens, eager and compiled.

    The last one is in FP8.
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
