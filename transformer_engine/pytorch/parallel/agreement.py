"""Compares what ranks are about to do, and raises the same error on all if they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.parallel.meeting import Facts, Meeting, listed

_ADVICE = "run the same layers, in the same order, with the same shapes and recipes"
_CALL = "what they do"
MOST_COMPARED = 32  # calls of one kind: ranks that agree on so many lengths agree on all
# The calls of each group that its ranks have compared, by op, see `agree_once`.
_compared: WeakKeyDictionary[Any, dict[str, set[tuple[str, ...]]]] = WeakKeyDictionary()


def agree(
    op: str,
    groups: Sequence[dist.ProcessGroup | None],
    doing: str,
    facts: Mapping[str, Any],
    error: str | None = None,
    layer: str = "",
) -> None:
    """Raise on every rank if two ranks differ, or if one of them has an error.

    All ranks call this before they do something together for the first time. A group has one
    sequence of calls, whatever they are about, so that ranks which do different things compare them
    and fail at once.

    Args:
        op: the module or function that calls this, for messages.
        groups: process groups whose ranks must agree. With two groups, such as the rows and columns
            of a mesh, the second compares what the first has found.
        doing: what the ranks are about to do, in words: "a call of layer fc1".
        facts: what must be equal on all ranks, by name.
        error: message of this rank; None if it has no error.
        layer: name of the layer, for messages.

    Raises:
        ValueError: a rank has an error.
        RuntimeError: ranks differ, or one did not call this within the timeout of the group.
    """
    own = {_CALL: doing, **{name: str(fact) for name, fact in facts.items()}}
    found: Facts = {str(dist.get_rank()): [own, error]}
    for group in groups:
        own_group: Any = group or dist.group.WORLD
        purpose = f"ranks {own_group.group_name}"
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


def agree_once(
    op: str,
    groups: Sequence[dist.ProcessGroup],
    facts: Mapping[str, Any],
    values: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """`agree` before the first call with these facts; later calls cost nothing.

    After `MOST_COMPARED` calls of `op` with different facts, no others are compared.

    `values` returns further facts that may differ from call to call; they are compared only before
    the first call with these `facts`.
    """
    if torch.compiler.is_compiling() or is_capturing():
        return
    known = _compared.setdefault(groups[0], {}).setdefault(op, set())
    key = tuple([str(fact) for fact in facts.values()])
    if key not in known and len(known) < MOST_COMPARED:
        agree(op, groups, f"a call of {op}", {**facts, **values()})
        known.add(key)


def mismatch(op: str, text: str, layer: str = "") -> str:
    """The message for ranks that differ by `text`, a result of `differences`.

    >>> mismatch("Linear", "dtype float32 (rank 0), bfloat16 (rank 1)", "fc1")
    '[Linear] expected ranks that do the same, got dtype float32 (rank 0), bfloat16 (rank 1) \
(layer fc1)'
    """
    where = f" (layer {layer})" if layer else ""
    return f"[{op}] expected ranks that do the same, got {text}{where}"


def differences(facts: Mapping[int, Mapping[str, str]]) -> str:
    """What differs between ranks: each value with the ranks that have it; "" if all are equal.

    For ranks that do different things only these are named, not their facts.

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
    """`str(x)` without addresses of functions, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(x))


def _together(posts: Mapping[int, Facts]) -> Facts:
    return {rank: said for post in posts.values() for rank, said in post.items()}
