"""Cross entropy of logits whose classes are spread over the ranks of a group, in fp32.

`parallel_cross_entropy` is a composition of torch operations, on any device; one rank takes the
same path without communication. `linear_cross_entropy` computes the sums of each rank's classes by
kernels; the functions below merge them over the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.kernels.cross_entropy import (
    ELSEWHERE,
    IGNORED,
    cross_entropy_forward,
)
from transformer_engine.pytorch.module.arguments import check_numbers, check_sizes
from transformer_engine.pytorch.module.inputs import check_devices, check_tensors, refuse_dtype
from transformer_engine.pytorch.parallel.agreement import agree_once
from transformer_engine.pytorch.parallel.groups import check_group

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Cross entropy of each token.

    Args:
        inp: logits `[..., classes]`, fp32, fp16 or bf16. If ranks share the classes, each has the
            same number of classes, in the order of the ranks.
        target: `[...]`, the class of each token, int64 or int32, counted over all ranks' classes.
        label_smoothing: share of the target that is spread evenly over all classes.
        reduce_loss: return the mean over the tokens that are not ignored.
        dist_process_group: the ranks that share the classes; None is this rank alone.
        ignore_idx: the target of tokens with neither loss nor gradient.
        is_cg_capturable: has no effect: CUDA graphs can always capture the function.

    Returns:
        fp32, `[...]`, or one number with `reduce_loss`. On a GPU, where the host does not wait to
        check targets, the loss of an invalid target is NaN.

    Raises:
        ValueError: shapes or devices that do not fit; on a CPU in eager mode, targets that are not
            classes.
        TypeError: other dtypes; a group, smoothing or ignored target of another type.

    >>> logits = torch.zeros(1, 2, 4, requires_grad=True)
    >>> parallel_cross_entropy(logits, torch.tensor([[1, -100]]))
    tensor([[1.3863, 0.0000]], grad_fn=<ViewBackward0>)
    """
    op = "parallel_cross_entropy"
    check_group(op, "dist_process_group", dist_process_group)
    check_tensors(op, inp=inp, target=target)
    if target.device != inp.device:
        check_devices(op, inp=inp, target=target)
    if inp.dtype not in HIGH_PRECISION:
        refuse_dtype(op, "inp", inp.dtype, None)
    if not inp.ndim or inp.shape[:-1] != target.shape or not inp.shape[-1]:
        raise ValueError(
            f"[{op}] expected inp [..., classes] and target [...], got "
            f"{tuple(inp.shape)} and {tuple(target.shape)}"
        )
    check_sizes(op, None, LEAST_TARGET, ignore_idx=ignore_idx)
    rules = Rules(label_smoothing, ignore_idx, group_of_several(dist_process_group))
    check_target(op, target, inp.shape[-1], rules)
    target = target.reshape(-1)
    losses: torch.Tensor = _CrossEntropy.apply(inp.reshape(-1, inp.shape[-1]), target, *rules)
    if reduce_loss:
        return losses.sum() / counted(target, ignore_idx)
    return losses.view(inp.shape[:-1])


LEAST_TARGET = torch.iinfo(torch.int64).min


class Rules(NamedTuple):
    """The settings of the loss.

    Attributes:
        smoothing: share of the target that is spread evenly over all classes.
        ignored: the target of tokens with neither loss nor gradient.
        group: process group of several ranks that share the classes, or None.
    """

    smoothing: float
    ignored: int
    group: Any

    @property
    def ranks(self) -> int:
        """How many ranks share the classes."""
        return 1 if self.group is None else dist.get_world_size(self.group)


def group_of_several(group: Any) -> Any:
    """The group, or None where this rank is alone in it."""
    return group if group is not None and dist.get_world_size(group) > 1 else None


def counted(target: torch.Tensor, ignored: int) -> torch.Tensor:
    """The number of tokens that are not ignored, at least 1, to divide by."""
    return (target != ignored).sum().clamp(min=1)


def check_target(op: str, target: torch.Tensor, size: int, rules: Rules) -> None:
    """Raise if targets are not among the classes (`size` on each rank), or if ranks differ."""
    if rules.group is not None:
        facts = {
            "targets": list(target.shape),
            "classes of a rank": size,
            "label_smoothing": rules.smoothing,
            "ignored": rules.ignored,
        }
        agree_once(op, [rules.group], facts)
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"[{op}] expected target of int64 or int32, got {target.dtype}")
    check_numbers(op, None, label_smoothing=rules.smoothing)
    if not 0.0 <= rules.smoothing <= 1.0:
        raise ValueError(f"[{op}] expected 0 <= label_smoothing <= 1, got {rules.smoothing}")
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        classes = size * rules.ranks
        wrong = target[((target < 0) | (target >= classes)) & (target != rules.ignored)]
        if wrong.numel():
            raise ValueError(
                f"[{op}] expected targets below {classes} or {rules.ignored}, got {wrong[0].item()}"
            )


def labels_of(target: torch.Tensor, size: int, rules: Rules) -> torch.Tensor:
    """int32 `[tokens]` for kernels: the index among this rank's classes, ELSEWHERE or IGNORED."""
    place = target if rules.group is None else target - dist.get_rank(rules.group) * size
    here = (place >= 0) & (place < size)
    return place.where(here, ELSEWHERE).masked_fill(target == rules.ignored, IGNORED).int()


def evenly(size: int, rules: Rules) -> float:
    """The share of the target that smoothing gives to each class; each rank has `size` classes."""
    return rules.smoothing / (size * rules.ranks)


def sums_of(logits: torch.Tensor, labels: torch.Tensor, rules: Rules) -> torch.Tensor:
    """`[4, tokens]`: the sums of `kernels.cross_entropy`, over the classes of all ranks."""
    sums = cross_entropy_forward(logits, labels)
    if rules.group is None:
        return sums
    largest, total, picked, spread = sums.unbind()
    top = largest.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, rules.group)
    found = labels >= 0
    further = largest.where(largest > -torch.inf, 0.0) - top
    parts = torch.stack(
        [
            total * (largest - top).exp(),
            (picked + further).where(found, 0.0),
            spread + logits.shape[1] * further,
            found.float(),
        ]
    )
    dist.all_reduce(parts, group=rules.group)
    total, picked, spread, ranks = parts.unbind()
    return torch.stack([top, total, picked.where(ranks > 0, torch.nan), spread])


def log_sums(sums: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of the exponentials of all logits, `[tokens]`."""
    return sums[1].log() + sums[0]


def losses_of(sums: torch.Tensor, labels: torch.Tensor, size: int, rules: Rules) -> torch.Tensor:
    """The losses `[tokens]`, fp32, from the sums of all ranks."""
    _, total, picked, spread = sums.unbind()
    losses = total.log() - (1 - rules.smoothing) * picked
    if rules.smoothing:
        losses = losses - evenly(size, rules) * spread
    return losses.where(labels != IGNORED, 0.0)


class _CrossEntropy(torch.autograd.Function):
    """Losses `[tokens]` of logits `[tokens, classes of this rank]`.

    The forward computes the gradient, because it has the probabilities in fp32, and saves it in the
    dtype of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        smoothing: float,
        ignored: int,
        group: Any,
    ) -> torch.Tensor:
        size, ranks, rank = logits.shape[1], 1, 0
        if group is not None:
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        largest = logits.amax(1).float()
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        values = logits - largest[:, None]  # fp32
        place = (target.long() - rank * size)[:, None]
        here = (place >= 0) & (place < size)
        place = place.clamp(0, size - 1)
        picked = values.gather(1, place).where(here, 0.0)
        spread = values.sum(1, keepdim=True) if smoothing else torch.zeros_like(picked)
        values.exp_()
        sums = torch.cat([values.sum(1, keepdim=True), picked, spread, here.float()], 1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, picked, spread, found = sums.unbind(1)
        evenly = smoothing / (size * ranks)
        loss = total.log() - (1 - smoothing) * picked - evenly * spread
        keep = target != ignored
        if ctx.needs_input_grad[0]:
            values.div_(total[:, None]).sub_(evenly)
            values.scatter_add_(1, place, (smoothing - 1) * here.float())
            ctx.save_for_backward(values.where(keep[:, None], 0.0).to(logits.dtype))
        return loss.where(found > 0, torch.nan).where(keep, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (saved_grad,) = ctx.saved_tensors
        return (saved_grad * grad[:, None]).to(saved_grad.dtype), None, None, None, None
