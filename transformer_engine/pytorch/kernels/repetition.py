"""What compiled layers cannot do in a backward, where a checkpoint runs their forward again.

Compiled code keeps no record of a first forward (see `regions`): it takes the scope that is open
and the scales of now. Where these are not those of the first forward, that is an error.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.autocast import autocast_stack
from transformer_engine.pytorch.kernels.library import library_op
from transformer_engine.pytorch.regions import graph_task


@library_op("refuse_repetition(Tensor x) -> ()", writes_unseen=True)
def refuse_repetition(x: torch.Tensor, *, launch: bool = True) -> None:
    """Part of the forward of compiled layers with delayed scaling.

    Args:
        x: any tensor, for its device.

    Raises:
        RuntimeError: it runs within a backward.
    """
    del x
    if launch and graph_task() != -1:
        raise RuntimeError(
            "[checkpoint] expected compiled layers with delayed scaling outside of checkpoints, got"
            " one whose forward runs again in the backward, when its scales have moved on: compile"
            " no layers inside of the checkpointed function, or use Float8CurrentScaling"
        )


@torch.compiler.assume_constant_result
def note_scope(kind: str, weights: tuple[tuple[int, int], ...], fp8: bool) -> None:
    """A layer is being compiled.

    Args:
        kind: its class.
        weights: their shapes.
        fp8: in an enabled scope.

    Raises:
        RuntimeError: within a backward and without a scope, where one like it had a scope before.
    """
    stack = autocast_stack()
    if fp8:
        stack.compiled_in_fp8.add((kind, weights))
    elif (kind, weights) in stack.compiled_in_fp8 and graph_task() != -1 and stack.repeated is None:
        raise RuntimeError(
            "[checkpoint] expected the autocast of a compiled layer to be open when a checkpoint"
            f" runs its forward again, got none for {kind} of weights {[*weights]}: enter the"
            " autocast inside of the checkpointed function, or use"
            " transformer_engine.pytorch.checkpoint, which restores it"
        )
