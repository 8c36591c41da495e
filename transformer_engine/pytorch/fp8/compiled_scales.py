"""Scales of compiled layers that a checkpoint recomputes in the backward.

Compiled code has no recompute regions (see `recompute_regions`): it uses the open scope and the
current scales. Inside a graph `te.checkpoint` saves the scales of the first forward (see
`recompute/compiled.py`). Where a recompute would use other scales, it is an error.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch._torch_private import constant_in_graphs, graph_task
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
    """Copies of scales, for a call of a compiled layer with delayed scaling: fp32 `[rows, scales]`.

    Row 0 holds copies of the scales, which a recompute uses again. Row 1 holds zeros, where the
    casts of the call collect amaxes; `count_amaxes` adds them once, not again in a recompute.

    Args:
        scales: fp32 `[1]` each.
        flush: first run the updates of scales that compiled code has deferred: the scope was
            entered in the graph, where nothing else can run them.
        recorded: autograd records the call.
        rows: 1 for the scales only, 2 for scales and amaxes.

    Raises:
        RuntimeError: a call that autograd records runs within a backward.
    """
    if launch and recorded:
        refuse_in_backward()
    if launch and flush:
        process_state().flush()
    # Keep each scale aligned to 16 bytes, as recordings need.
    copies = torch.cat([scale.as_strided((ALIGNED,), (1,)) for scale in scales]).unsqueeze(0)
    return copies if rows == 1 else torch.cat((copies, torch.zeros_like(copies)))


def refuse_in_backward() -> None:
    """Raise RuntimeError within a backward, where a forward with delayed scaling is a recompute."""
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
    """Raise the amaxes of the step to those of a call; does nothing for a recompute.

    Args:
        after: a result of the call, so that this runs after its casts.
        values: returned by `scales_of_call`; its row 1 now holds the amaxes of the casts.
        amaxes: the amaxes of the step, fp32 `[1]` each.
    """
    del after
    if launch and graph_task() == -1:
        torch._foreach_maximum_(amaxes, list(values[1, ::ALIGNED].split(1)))


@constant_in_graphs
def record_scope(kind: str, weights: tuple[tuple[int, int], ...], fp8: bool) -> None:
    """Remember that a layer was compiled in an FP8 scope, and check the scope of a recompute.

    `kind` is the class of the layer, and `weights` are the shapes of its weights.

    Raises:
        RuntimeError: a layer is compiled within a backward and outside of any scope, but such a
            layer was compiled inside one before.
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
