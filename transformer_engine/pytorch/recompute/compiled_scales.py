"""Compiled layers whose forward runs again in a backward, because a checkpoint says so.

Compiled code keeps no record of a first forward (see `regions`): it takes the scope that is open
and the scales that it finds. Within a graph, `te.checkpoint` lets the scales of the first forward
be kept (see `graph_checkpoint`). Where those of now are not those of then, that is an error.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch._torch_private import graph_task
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.scaling_state import ALIGNED
from transformer_engine.pytorch.kernels.library import library_op


@library_op()
def scales_of_call(
    scales: list[torch.Tensor],
    flush: bool,
    recorded: bool,
    rows: int,
    *,
    launch: bool = True,
) -> torch.Tensor:
    """What a call of a compiled layer with delayed scaling casts with: fp32 `[rows, scales]`.

    The first row are copies of the scales, so that a forward which runs again may use those of the
    first; the second are zeros, for amaxes that must not be counted twice (see `count_amaxes`).

    Args:
        scales: fp32 `[1]` each.
        flush: first run the updates that compiled code has deferred. A scope entered in eager mode
            runs them itself; between the operators of a graph nothing may run.
        recorded: by autograd.
        rows: 1 or 2.

    Raises:
        RuntimeError: a call that autograd records runs within a backward.
    """
    if launch and recorded:
        refuse_in_backward()
    if launch and flush:
        process_state().flush()
    # Each by itself, as it was: recordings take what begins at 16 bytes.
    copies = torch.cat([scale.as_strided((ALIGNED,), (1,)) for scale in scales]).unsqueeze(0)
    return copies if rows == 1 else torch.cat((copies, torch.zeros_like(copies)))


def refuse_in_backward() -> None:
    """Raise RuntimeError within a backward: a forward with delayed scaling runs again there."""
    if graph_task() != -1:
        raise RuntimeError(
            "[checkpoint] expected compiled layers with delayed scaling outside of checkpoints, got"
            " one whose forward runs again in the backward, when its scales have moved on: call"
            " transformer_engine.pytorch.checkpoint in the compiled function, compile no layers"
            " inside of the checkpointed function, or use Float8CurrentScaling"
        )


@library_op(has_side_effects=True)
def count_amaxes(
    after: torch.Tensor, values: torch.Tensor, amaxes: list[torch.Tensor], *, launch: bool = True
) -> None:
    """Raise the amaxes of the running step to those of a call; a backward has no call to count.

    Args:
        after: a result of the call, for which everything was cast.
        values: what `scales_of_call` gave, with the amaxes of the casts in its second row.
        amaxes: fp32 `[1]` each.
    """
    del after
    if launch and graph_task() == -1:
        torch._foreach_maximum_(amaxes, list(values[1, ::ALIGNED].split(1)))


@torch.compiler.assume_constant_result
def record_scope(kind: str, weights: tuple[tuple[int, int], ...], fp8: bool) -> None:
    """A layer is being compiled.

    Args:
        kind: its class.
        weights: their shapes.
        fp8: in an enabled scope.

    Raises:
        RuntimeError: within a backward and without a scope, where one like it had a scope before.
    """
    known = process_state().compiled_in_fp8
    if fp8:
        known.add((kind, weights))
    elif (kind, weights) in known and graph_task() != -1 and autocast_stack().recomputed is None:
        raise RuntimeError(
            "[checkpoint] expected the autocast of a compiled layer to be open when a checkpoint"
            f" runs its forward again, got none for {kind} of weights {[*weights]}: enter the"
            " autocast inside of the checkpointed function, or use"
            " transformer_engine.pytorch.checkpoint, which restores it"
        )
