"""Checks that all tensor parallel ranks make the same call of a layer, before its collectives.

A collective hangs or returns garbage if ranks call it with different shapes, or if one rank does
not call it. The check runs once for each plan and shape that is recorded; other calls cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.user_buffers import note_layer
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.casts.quantizers import GemmQuantizers
from transformer_engine.pytorch.parallel.agreement import agree, without_addresses


def check_agreement(plan: CallPlan, inputs: Sequence[Any]) -> None:
    """Raise unless all ranks are about to run the same chain, with collectives, on equal shapes.

    Raises:
        RuntimeError: on every rank, if the calls of the ranks differ or a rank does not reach this
            call; on this rank, if the layer asks for overlap without `initialize_ub`.
    """
    stages = [stage for stage in plan.chain.stages if stage.communicates]
    for ranks in {id(stage.ranks): stage.ranks for stage in stages}.values():
        group = ranks.check()
        note_layer(ranks)
        # Default names number the modules of a process, which may differ between ranks.
        doing = f"a call of layer {re.sub(r'^Layer_[0-9]+', 'Layer_N', ranks.layer)}"
        agree(ranks.op, [group], doing, _facts(plan, inputs), layer=ranks.layer)


def _facts(plan: CallPlan, inputs: Sequence[Any]) -> dict[str, Any]:
    values, scope = inputs[: plan.chain.inputs], autocast_stack().scope
    stages = enumerate(zip(plan.chain.stages, plan.stage_plans, strict=True))
    return {
        "input": [list(x.shape) for x in values],
        **{f"stage {i}": stage.described(own) for i, (stage, own) in stages},
        "parameters": [None if p is None else list(p.shape) for p in inputs[len(values) :]],
        "dtype": plan.dtype,
        "GEMMs in": ", ".join(dict.fromkeys(_described(one) for one in plan.quantizers)),
        "recipe": without_addresses(scope.recipe) if scope.enabled else "none",
        "gradients": list(plan.needs),
    }


def _described(quantizers: GemmQuantizers) -> str:
    """How the operands of a GEMM are cast, and whether the debugger inspects it."""
    casts = quantizers.input.scaling if quantizers.fp8 else "high precision"
    return f"{casts}, inspected" if quantizers.wrapped else casts
