"""Ranks that disagree end with an error on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist


def agree(
    op: str, groups: Sequence[dist.ProcessGroup], facts: Mapping[str, Any], error: str | None
) -> None:
    """Raise ValueError on every rank, if any two ranks of a group differ or one has an error.

    It is a collective: all ranks call it, each time that they meet what they have not met before.

    Args:
        op: whose call it is.
        groups: of ranks that are to agree.
        facts: what they are to agree on, by name.
        error: of this rank; None where there is none.
    """
    own = ({name: str(fact) for name, fact in facts.items()}, error)
    found: dict[int, Any] = {}
    for group in groups:
        members = dist.get_process_group_ranks(group)
        all_own: list[Any] = [None] * len(members)
        dist.all_gather_object(all_own, found or own, group=group)
        gathered: dict[int, Any] = {}
        for member, one in zip(members, all_own, strict=True):
            gathered.update(one if isinstance(one, dict) else {member: one})
        found = gathered
    errors = {rank: error for rank, (_, error) in found.items() if error is not None}
    if errors:
        rank, text = min(errors.items())
        on_all = len(errors) == len(found) and len(set(errors.values())) == 1
        raise ValueError(text if on_all else f"{text} (on rank {rank})")
    differences = [_difference(name, found) for name in facts]
    text = "; ".join(difference for difference in differences if difference)
    if text:
        raise ValueError(f"[{op}] expected calls that are alike on all ranks, got {text}")


def _difference(name: str, found: Mapping[int, Any]) -> str:
    """Which ranks have which value of a fact; empty where all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, (facts, _) in sorted(found.items()):
        ranks.setdefault(facts.get(name, "nothing"), []).append(rank)
    if len(ranks) == 1:
        return ""
    listed = (f"{value} on rank {', '.join(map(str, on))}" for value, on in ranks.items())
    return f"{name} " + " but ".join(listed)
