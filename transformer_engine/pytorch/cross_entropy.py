"""Cross entropy of logits whose classes are spread over the ranks of a group, in fp32.

Compositions of torch operations, on any device. One rank is the same path without communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch._torch_private import once_differentiable
from transformer_engine.pytorch.dtypes import HIGH_PRECISION
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
        inp: logits `[..., classes]`, fp32, fp16 or bf16; of several ranks, each rank's share of the
            classes, in order and equal in number.
        target: `[...]`, the class of each token, int64 or int32; of all ranks' classes.
        label_smoothing: share of the target that is spread evenly over all classes.
        reduce_loss: return the mean over the tokens that are not ignored.
        dist_process_group: of the ranks that share the classes; None is this rank alone.
        ignore_idx: the target of tokens with neither loss nor gradient.
        is_cg_capturable: has no effect: CUDA graphs can hold it always.

    Returns:
        fp32, `[...]`, or one number with `reduce_loss`. On a GPU, where nobody waits to look at
        targets, the loss of a target that is no class is NaN.

    Raises:
        ValueError: shapes that do not fit; on a CPU in eager mode, targets that are no classes.
        TypeError: other dtypes; a group that is none.

    >>> logits = torch.zeros(1, 2, 4, requires_grad=True)
    >>> parallel_cross_entropy(logits, torch.tensor([[1, -100]]))
    tensor([[1.3863, 0.0000]], grad_fn=<ViewBackward0>)
    """
    check_group("parallel_cross_entropy", "dist_process_group", dist_process_group)
    ranks = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    _check(inp, target, ranks, ignore_idx, label_smoothing)
    group = dist_process_group if ranks > 1 else None
    target = target.reshape(-1)
    losses: torch.Tensor = _CrossEntropy.apply(
        inp.reshape(-1, inp.shape[-1]), target, label_smoothing, ignore_idx, group
    )
    if reduce_loss:
        return losses.sum() / (target != ignore_idx).sum().clamp(min=1)
    return losses.view(inp.shape[:-1])


def _check(
    inp: torch.Tensor, target: torch.Tensor, ranks: int, ignored: int, smoothing: float
) -> None:
    if inp.dtype not in HIGH_PRECISION:
        raise TypeError(
            "[parallel_cross_entropy] expected inp of float32, float16 or bfloat16, got "
            f"{inp.dtype}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"[parallel_cross_entropy] expected target of int64 or int32, got {target.dtype}"
        )
    if not inp.ndim or inp.shape[:-1] != target.shape or not inp.shape[-1]:
        raise ValueError(
            "[parallel_cross_entropy] expected inp [..., classes] and target [...], got "
            f"{tuple(inp.shape)} and {tuple(target.shape)}"
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(
            f"[parallel_cross_entropy] expected 0 <= label_smoothing <= 1, got {smoothing}"
        )
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = target[((target < 0) | (target >= inp.shape[-1] * ranks)) & (target != ignored)]
        if wrong.numel():
            raise ValueError(
                f"[parallel_cross_entropy] expected targets below {inp.shape[-1] * ranks} or "
                f"{ignored}, got {wrong[0].item()}"
            )


class _CrossEntropy(torch.autograd.Function):
    """Losses `[tokens]` of logits `[tokens, classes of this rank]`.

    The gradient is made in the forward, where fp32 probabilities are at hand, and kept in the dtype
    of the logits.
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
