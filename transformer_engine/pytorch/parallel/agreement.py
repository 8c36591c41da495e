"""Ranks that disagree end with an error on each of them, which names ranks and difference."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from transformer_engine.pytorch.parallel.meeting import Facts, Meeting, listed, ranks_of

_ADVICE = "run the same layers, in the same order, with the same shapes and recipes"
_CALL = "what they do"


def agree(
    op: str,
    groups: Sequence[dist.ProcessGroup | None],
    doing: str,
    facts: Mapping[str, Any],
    error: str | None = None,
    layer: str = "",
) -> None:
    """Raise on every rank, if any two ranks of a group differ or one has an error.

    All ranks call it, each time that they are about to do what they have not done before. The
    meetings of a group have one order, whatever they are about: ranks that do different things find
    that out at once.

    Args:
        op: whose call it is.
        groups: of ranks that are to agree, those of the second with those of the first.
        doing: what they are about to do, in words: "a call of layer fc1".
        facts: what they are to agree on, by name.
        error: of this rank; None where there is none.
        layer: its name, for messages.

    Raises:
        ValueError: an error of a rank.
        RuntimeError: what differs; ranks that did not come within the timeout of the group.
    """
    own = {_CALL: doing, **{name: str(fact) for name, fact in facts.items()}}
    found: Facts = {str(dist.get_rank()): [own, error]}
    for group in groups:
        own_group: Any = group or dist.group.WORLD
        purpose = f"ranks {own_group.group_name} {ranks_of(own_group)}"
        found = Meeting(group, purpose, op, _ADVICE).hold(found, doing, _together)
    said = {int(rank): said for rank, said in sorted(found.items(), key=lambda one: int(one[0]))}
    errors = {rank: error for rank, (_, error) in said.items() if error is not None}
    if errors:
        rank, text = min(errors.items())
        on_all = len(errors) == len(said) and len(set(errors.values())) == 1
        raise ValueError(text if on_all else f"{text} (rank {rank})")
    text = differences({rank: facts for rank, (facts, _) in said.items()})
    if text:
        raise RuntimeError(mismatch(op, text, layer))


def mismatch(op: str, text: str, layer: str = "") -> str:
    """The error of ranks that differ, as `differences` says.

    >>> mismatch("Linear", "dtype float32 (rank 0), bfloat16 (rank 1)", "fc1")
    '[Linear] expected ranks that do the same, got dtype float32 (rank 0), bfloat16 (rank 1) \
(layer fc1)'
    """
    where = f" (layer {layer})" if layer else ""
    return f"[{op}] expected ranks that do the same, got {text}{where}"


def differences(facts: Mapping[int, Mapping[str, str]]) -> str:
    """What differs between ranks: each value with those that have it; "" where nothing does.

    Ranks that do different things are not compared any further.

    >>> differences({0: {"dtype": "float32"}, 1: {"dtype": "bfloat16"}, 2: {"dtype": "bfloat16"}})
    'dtype float32 (rank 0), bfloat16 (ranks 1, 2)'
    """
    texts = []
    for name in dict.fromkeys(name for said in facts.values() for name in said):
        ranks: dict[str, list[int]] = {}
        for rank, said in facts.items():
            ranks.setdefault(said.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} ({listed(on)})" for value, on in ranks.items())
            if name == _CALL:
                return values
            texts.append(f"{name} {values}")
    return "; ".join(texts)


def without_addresses(x: object) -> str:
    """Its text, for comparing: functions have other addresses on each rank."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(x))


def _together(posts: Mapping[int, Facts]) -> Facts:
    return {rank: said for post in posts.values() for rank, said in post.items()}
