"""Ranks that share a layer compare what they are about to do, before they first do it together.

A collective for which ranks come with other shapes, or of which one knows nothing, hangs or gives
garbage. Later calls of a structure pay nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.user_buffers import note_layer
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.quantizers import GemmQuantizers
from transformer_engine.pytorch.parallel.agreement import agree, without_addresses


def check_agreement(plan: CallPlan, inputs: Sequence[Any]) -> None:
    """Raise unless all ranks are about to run the same chain on equal shapes.

    Args:
        plan: of a chain that communicates.
        inputs: the values that come in, then all parameters.

    Raises:
        RuntimeError: ranks differ, or one does not come; on every rank. Overlap was asked for
            without `initialize_ub`.
    """
    stages = [stage for stage in plan.chain.stages if stage.communicates]
    for ranks in {id(stage.ranks): stage.ranks for stage in stages}.values():
        group = ranks.check()
        note_layer(ranks)
        # Numbers in names that were made up count the modules of a process.
        doing = f"a call of layer {re.sub(r'^Layer_[0-9]+', 'Layer_N', ranks.layer)}"
        agree(ranks.op, [group], doing, _facts(plan, inputs), layer=ranks.layer)


def _facts(plan: CallPlan, inputs: Sequence[Any]) -> dict[str, Any]:
    values, scope = inputs[: plan.chain.inputs], autocast_stack().scope
    return {
        "input": [list(x.shape) for x in values],
        "stages": [stage.label for stage in plan.chain.stages],
        "parameters": [None if p is None else list(p.shape) for p in inputs[len(values) :]],
        "dtype": plan.dtype,
        "GEMMs in": ", ".join(dict.fromkeys(_described(one) for one in plan.quantizers)),
        "recipe": without_addresses(scope.recipe) if scope.enabled else "none",
        "gradients": list(plan.needs),
    }


def _described(quantizers: GemmQuantizers) -> str:
    """How its operands are cast, and whether the debugger looks."""
    casts = quantizers.input.scaling if quantizers.fp8 else "high precision"
    return f"{casts}, inspected" if quantizers.wrapped else casts
