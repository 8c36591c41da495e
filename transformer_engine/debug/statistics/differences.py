"""Compares what the ranks of a reduction group are about to merge, and describes differences.

`differ` and `explain` are the judges of meetings (`parallel.meeting`): the first rank of the group
calls them with the facts of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from transformer_engine.pytorch.parallel.agreement import differences, mismatch
from transformer_engine.pytorch.parallel.meeting import Facts, listed

Row = tuple[str, ...]  # type of device, layer, tensor, source of the slot
ADVICE = (
    "ranks that run different layers (pipeline stages) or have different configurations need "
    "reduction groups of their own: debug_api.set_tensor_reduction_group(group); a layer that has "
    "not run on a rank yet is known there by debug_api.infer_and_assign_layer_names(model)"
)
_OP = "statistics"
_MOST_NAMED = 3
_GROUP = "reduction group"


@dataclass
class RankFacts:
    """What one rank is about to merge.

    Attributes:
        group: the ranks of the reduction group of this rank.
        name: name of the reduction group; "" if it is the group of all ranks.
        config: digest of the configuration of this rank.
        sections: names of the sections of that configuration.
        iteration: the iteration that ends.
        digests: for each group that merges rows, the digest of the names of its rows; the key is
            that of `key_of`.
        rows: for each group, the names of its rows; sent only if digests differ.
        layers: names of the layers of the rank, whether or not they have run.
    """

    group: Sequence[int]
    name: str
    config: int
    sections: Sequence[str]
    iteration: int
    digests: Mapping[str, int]
    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    layers: Sequence[str] = ()

    def posted(self) -> Facts:
        """Return the fields as a dict for JSON."""
        return asdict(self)


def differ(posts: Mapping[int, Facts]) -> Facts:
    """Judge whether ranks differ in anything; the verdict of a `Meeting`.

    Ranks that have different groups cannot meet a second time, so they get an `error` at once.
    """
    found = {rank: RankFacts(**facts) for rank, facts in posts.items()}
    if len({(facts.name, *facts.group) for facts in found.values()}) > 1:
        groups = differences(
            {rank: {_GROUP: _said(facts)[_GROUP]} for rank, facts in found.items()}
        )
        advice = "all of them set it by debug_api.set_tensor_reduction_group, or none"
        return {"alike": False, "error": mismatch(_OP, f"{groups}; {advice}")}
    of_rows = any(_of_key(found, key) for key in _keys(found))
    return {"alike": not of_rows and not _of_sessions(found)}


def explain(posts: Mapping[int, Facts]) -> Facts:
    """Describe how ranks differ: a verdict with an `error`, or with the `rows` of each rank.

    If only the rows of the reduction group differ, and every rank has the layers of the rows that
    it lacks, there is no error: training continues with the union of all rows.
    """
    found = {rank: RankFacts(**facts) for rank, facts in posts.items()}
    sessions = _of_sessions(found)
    own = {r: set(map(tuple, facts.rows[key_of(facts.group)])) for r, facts in found.items()}
    union = set.union(*own.values())
    known = all(_can_learn(found[rank], rows, union - rows) for rank, rows in own.items())
    others = [key for key in _keys(found) if key != key_of(found[min(found)].group)]
    if not sessions and known and not any(_of_key(found, key) for key in others):
        return {"error": "", "rows": {r: f.rows[key_of(f.group)] for r, f in found.items()}}
    names = "; ".join(text for key in _keys(found) if (text := _names(found, key)))
    got = "; ".join(text for text in (names, sessions, names and ADVICE) if text)
    return {"error": mismatch(_OP, got)}


def key_of(ranks: Iterable[int]) -> str:
    """Return the key of a group of ranks in `digests` and `rows`."""
    return ",".join(map(str, ranks))


def _keys(found: Mapping[int, RankFacts]) -> list[str]:
    return list(dict.fromkeys(key for facts in found.values() for key in facts.digests))


def _can_learn(facts: RankFacts, own: Iterable[Row], lacking: Iterable[Row]) -> bool:
    """Whether a rank has the layers of the rows that it lacks; rows of weights it cannot add."""
    layers = {*facts.layers, *(row[1] for row in own)}
    return all(
        tensor != "weight" and (layer in layers or layer.rpartition(".")[0] in layers)
        for _, layer, tensor, _ in lacking
    )


def _of_key(found: Mapping[int, RankFacts], key: str) -> bool:
    """Whether the ranks of a group differ in the rows of that group."""
    members = [int(rank) for rank in key.split(",")]
    return len({found[r].digests.get(key) for r in members if r in found}) > 1


def _of_sessions(found: Mapping[int, RankFacts]) -> str:
    """Describe differences in group, configuration and iteration; "" if there are none."""
    return differences({rank: _said(facts) for rank, facts in found.items()})


def _said(facts: RankFacts) -> dict[str, str]:
    return {
        _GROUP: f"{facts.name or 'the default'} of {listed(facts.group)}",
        "configuration": f"{facts.config:012x} of {', '.join(facts.sections)}",
        "iteration": str(facts.iteration),
    }


def _names(found: Mapping[int, RankFacts], key: str) -> str:
    """Describe which tensors are inspected only on some ranks of a group."""
    members = [r for r in map(int, key.split(",")) if r in found]
    where: dict[tuple[str, str], list[int]] = {}
    for rank in members:
        for name in dict.fromkeys((row[1], row[2]) for row in found[rank].rows.get(key, ())):
            where.setdefault(name, []).append(rank)
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for (layer, tensor), ranks in where.items():
        if len(ranks) < len(members):
            by_ranks.setdefault(tuple(ranks), []).append(f"layer {layer}, tensor {tensor}")
    texts = []
    for those, names in by_ranks.items():
        others = [rank for rank in members if rank not in those]
        few = len(those) <= len(others)
        where_text = f"only on {listed(those)}" if few else f"not on {listed(others)}"
        more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        texts.append(f"{', '.join(names[:_MOST_NAMED])}{more} {where_text}")
    return "; ".join(texts)
