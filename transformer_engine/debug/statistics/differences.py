"""What ranks tell each other of the rows that they are about to merge, and how they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from transformer_engine.debug.meeting import Facts, listed

Row = tuple[str, ...]  # device, layer, tensor, what its slot is fed with
ADVICE = (
    "ranks that run different layers (pipeline stages) or have different configurations need "
    "reduction groups of their own: debug_api.set_tensor_reduction_group(group); a layer that has "
    "not run on a rank yet is known there by debug_api.infer_and_assign_layer_names(model)"
)
_EXPECTED = "[statistics] expected all ranks of the reduction group to"
_MOST_NAMED = 3


@dataclass
class RankFacts:
    """What a rank is about to do.

    Attributes:
        group: the ranks of its reduction group.
        name: of that group; "" of all ranks.
        config: digest of its configuration.
        sections: of that configuration.
        iteration: that ends.
        digests: of the rows of each group of ranks, the reduction group among them.
        rows: themselves, where digests have been found to differ.
        layers: names of the layers that it has, whether or not they have run.
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
        """As JSON takes it."""
        return asdict(self)


def differ(posts: Mapping[int, Facts]) -> Facts:
    """Whether ranks differ in anything: a verdict of a `Meeting`.

    Ranks with different groups do not meet again, so there is an `error` already.
    """
    found = {rank: RankFacts(**facts) for rank, facts in posts.items()}
    groups = _of_sessions(found)[:1]
    if len({(facts.name, *facts.group) for facts in found.values()}) > 1:
        set_it = "have set it (debug_api.set_tensor_reduction_group)"
        return {"alike": False, "error": f"{_EXPECTED} {set_it}, got {groups[0]}"}
    of_rows = any(_of_key(found, key) for key in _keys(found))
    return {"alike": not of_rows and not _of_sessions(found)}


def explain(posts: Mapping[int, Facts]) -> Facts:
    """How ranks differ: a verdict with `error`, or with the `rows` of the reduction group by rank.

    Ranks whose rows alone differ go on with the rows of all of them, if each has the layers that it
    lacks rows of.
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
    wanted = "look at the same tensors" if names else "run the same session"
    got = "; ".join(text for text in (names, *sessions, names and ADVICE) if text)
    return {"error": f"{_EXPECTED} {wanted}, got {got}"}


def key_of(ranks: Iterable[int]) -> str:
    """The key of a group in `digests` and `rows`."""
    return ",".join(map(str, ranks))


def _keys(found: Mapping[int, RankFacts]) -> list[str]:
    return list(dict.fromkeys(key for facts in found.values() for key in facts.digests))


def _can_learn(facts: RankFacts, own: Iterable[Row], lacking: Iterable[Row]) -> bool:
    """Whether a rank has the layers of the rows that it lacks. The group of a weight it lacks."""
    layers = {*facts.layers, *(row[1] for row in own)}
    return all(
        tensor != "weight" and (layer in layers or layer.rpartition(".")[0] in layers)
        for _, layer, tensor, _ in lacking
    )


def _of_key(found: Mapping[int, RankFacts], key: str) -> bool:
    """Whether the ranks of a group have different rows of it."""
    members = [int(rank) for rank in key.split(",")]
    return len({found[r].digests.get(key) for r in members if r in found}) > 1


def _of_sessions(found: Mapping[int, RankFacts]) -> list[str]:
    """What differs whatever the layers are."""
    texts = []
    for what, of in (
        ("reduction groups", _group),
        ("configurations", lambda facts: f"{facts.config:012x} of {', '.join(facts.sections)}"),
        ("iterations", lambda facts: str(facts.iteration)),
    ):
        by_value: dict[str, list[int]] = {}
        for rank, facts in found.items():
            by_value.setdefault(of(facts), []).append(rank)
        if len(by_value) > 1:
            said = ", ".join(f"{value} ({listed(ranks)})" for value, ranks in by_value.items())
            texts.append(f"{what} that differ: {said}")
    return texts


def _group(facts: RankFacts) -> str:
    return f"{facts.name or 'the default'} of {listed(facts.group)}"


def _names(found: Mapping[int, RankFacts], key: str) -> str:
    """The tensors of a group that not all of its ranks look at."""
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
