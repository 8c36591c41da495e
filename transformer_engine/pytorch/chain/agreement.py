"""Ranks tell each other what they are about to do, before they first do it together.

A collective for which ranks come with other shapes, or of which one knows nothing, hangs or gives
garbage. So before the first call of a structure each rank writes what it will do into the store of
`torch.distributed`, and reads what the others wrote: nothing is sent that could be mistaken for
something else, and a rank that does not come is an error when the timeout of
`init_process_group` is over. Later calls of the structure pay nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from transformer_engine.pytorch._torch_private import default_store
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.user_buffers import note_layer
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.quantizers import GemmQuantizers
from transformer_engine.pytorch.parallel.groups import TensorParallel

Facts = dict[str, Any]


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
        ranks.check()
        note_layer(ranks)
        _compare(ranks, {"layer": ranks.layer, **_facts(plan, inputs)})


def _facts(plan: CallPlan, inputs: Sequence[Any]) -> Facts:
    values = inputs[: plan.chain.inputs]
    return {
        "input": [list(x.shape) for x in values],
        "stages": [stage.label for stage in plan.chain.stages],
        "parameters": [None if p is None else list(p.shape) for p in inputs[len(values) :]],
        "dtype": str(plan.dtype),
        "GEMMs": [_described(quantizers) for quantizers in plan.quantizers],
        "gradients": list(plan.needs),
    }


def _described(quantizers: GemmQuantizers) -> str:
    """How its operands are cast, and whether the debugger looks."""
    casts = quantizers.input.scaling if quantizers.fp8 else "high precision"
    return f"{casts}, inspected" if quantizers.wrapped else casts


def _compare(ranks: TensorParallel, mine: Facts) -> None:
    store = default_store()
    if store is None:
        return
    members, here = dist.get_process_group_ranks(ranks.group), dist.get_rank()
    group = "-".join([ranks.group.group_name, *map(str, members)])
    counts = process_state().agreements
    number = counts[group] = counts.get(group, 0) + 1

    def key(count: int, rank: int) -> str:
        return f"transformer_engine/{group}/{count}/{rank}"

    store.set(key(number, here), json.dumps(mine))
    for rank in members:
        try:
            theirs = json.loads(store.get(key(number, rank)))
        except Exception as error:
            raise RuntimeError(
                f"[{ranks.op}] expected rank {rank} to run a layer with rank {here} within "
                f"{store.timeout}, got none (layer {mine['layer']})"
            ) from error
        differences = [name for name in mine if not _alike(name, mine[name], theirs.get(name))]
        if differences:
            told = "; ".join(
                f"{name} {mine[name]} on rank {here}, {theirs.get(name)} on rank {rank}"
                for name in differences
            )
            raise RuntimeError(
                f"[{ranks.op}] expected ranks that do the same, got {told} (layer {mine['layer']})"
            )
    # All who have written under this number have read everything under the one before.
    store.delete_key(key(number - 1, here))


def _alike(name: str, one: Any, other: Any) -> bool:
    """Numbers in names that were made up count the modules of a process."""
    if name != "layer":
        return bool(one == other)
    made_up = r"^Layer_\d+"
    return re.sub(made_up, "", one) == re.sub(made_up, "", str(other))
