"""Which backward of a weight overwrites `main_grad`, so that nobody has to fill it with zeros.

`main_grad` becomes the sum of all uses of a weight since the last forward with
`is_first_microbatch=True`: the first backward that comes after it overwrites, whichever forward it
belongs to, and the others add. With `overwrite_main_grad` each backward of a graph begins anew.

A forward leaves a mark, which lives as long as its graph, or as the checkpoint that will run the
forward again. So a forward without a backward has no effect once its results are gone.
"""

from __future__ import annotations

from weakref import ref

import torch

from transformer_engine.pytorch._torch_private import graph_task


class MainGradUses:
    """The mark of forwards of a weight.

    Attributes:
        weight: the weight, which is kept: another one must not get its id.
        pending: the next backward overwrites.
        task: the backward of a graph that has last written, if `overwrite_main_grad` is set.
    """

    weight: torch.Tensor
    pending = True
    task = -1


MARKS: dict[int, ref[MainGradUses]] = {}  # the last mark of each weight, by its id


def mark_forward(weight: torch.Tensor, every_backward: bool) -> MainGradUses:
    """Let the next backward of a weight overwrite `main_grad`, as long as the result is kept.

    With `every_backward` each backward of a graph begins anew, see `overwrites`.
    """
    found = MARKS.get(id(weight))
    uses = None if found is None else found()
    if uses is not None and (uses.pending or every_backward or graph_task() != -1):
        return uses  # within a backward, the forward of a checkpoint runs again
    uses = MainGradUses()
    uses.weight = weight
    MARKS[id(weight)] = ref(uses)
    return uses


def overwrites(weight: torch.Tensor, every_backward: bool) -> bool:
    """Whether the backward that comes now overwrites `main_grad`; the next one will add.

    With `every_backward` the first one in each backward of a graph overwrites.
    """
    found = MARKS.get(id(weight))
    uses = None if found is None else found()
    if uses is None:
        return every_backward
    if every_backward:
        task, before = graph_task(), uses.task
        uses.task = task
        return task != before
    first, uses.pending = uses.pending, False
    return first
