"""Ranks that disagree end with an error on each of them.

They meet in the key-value store that the default process group was made with, not in a collective:
one that others do not join would be taken for the next one that they do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from transformer_engine.pytorch._torch_private import default_store


def agree(
    op: str, groups: Sequence[dist.ProcessGroup], facts: Mapping[str, Any], error: str | None
) -> None:
    """Raise on every rank, if any two ranks of a group differ or one has an error.

    All ranks call it, each time that they meet what they have not met before.

    Args:
        op: whose call it is.
        groups: of ranks that are to agree, those of the second with those of the first.
        facts: what they are to agree on, by name.
        error: of this rank; None where there is none.

    Raises:
        ValueError: what differs, or an error.
        RuntimeError: ranks that did not come within the timeout of the store.
    """
    own = [{name: str(fact) for name, fact in facts.items()}, error]
    found: dict[str, Any] = {str(dist.get_rank()): own}
    for group in groups:
        for one in _posted(op, group, found):
            found = {**found, **one}
    errors = {int(rank): error for rank, (_, error) in found.items() if error is not None}
    if errors:
        rank, text = min(errors.items())
        on_all = len(errors) == len(found) and len(set(errors.values())) == 1
        raise ValueError(text if on_all else f"{text} (on rank {rank})")
    differences = [_difference(name, found) for name in facts]
    text = "; ".join(difference for difference in differences if difference)
    if text:
        raise ValueError(f"[{op}] expected calls that are alike on all ranks, got {text}")


def _posted(op: str, group: dist.ProcessGroup, own: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks of a group say."""
    members, store = dist.get_process_group_ranks(group), default_store()
    if store is None:
        collected: list[Any] = [None] * len(members)
        dist.all_gather_object(collected, own, group=group)
        return collected
    name, rank = f"te/agree/{group.group_name}", dist.get_rank()
    turn = store.add(f"{name}/{rank}", 1)
    keys = {member: f"{name}/{turn}/{member}" for member in members}
    store.set(keys[rank], json.dumps(own))
    try:
        store.wait([*keys.values()])
    except RuntimeError as error:
        absent = [member for member, key in keys.items() if not store.check([key])]
        raise RuntimeError(
            f"[{op}] expected rank {', '.join(map(str, absent))} to make a call that is new to rank"
            f" {rank}, got none within {store.timeout.total_seconds():g} s: {own[str(rank)][0]}"
        ) from error
    return [json.loads(store.get(key)) for key in keys.values()]


def _difference(name: str, found: Mapping[str, Any]) -> str:
    """Which ranks have which value of a fact; empty where all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, (facts, _) in sorted((int(rank), said) for rank, said in found.items()):
        ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
    if len(ranks) == 1:
        return ""
    listed = (f"{value} on rank {', '.join(map(str, on))}" for value, on in ranks.items())
    return f"{name} " + " but ".join(listed)
