"""How ranks compare their facts, and which tensors are replicated, tested in one process."""

from types import SimpleNamespace

import pytest

from transformer_engine.debug.names import replicated_tensors
from transformer_engine.debug.statistics.differences import RankFacts, differ, explain, key_of

ALL = (0, 1, 2, 3)


def row(layer: str, tensor: str = "activation") -> tuple[str, ...]:
    return "cpu", layer, tensor, "moments"


def facts(*rows: tuple[str, ...], group: tuple[int, ...] = ALL, **more) -> dict:
    """Returns the facts of a rank that has these rows in its reduction group."""
    key = key_of(group)
    known = {"name": "", "config": 1, "sections": ["look"], "iteration": 0}
    digests, by_group = {key: hash(rows)}, {key: rows}
    return RankFacts(
        **{"group": group, "digests": digests, "rows": by_group, **known, **more}
    ).posted()


def test_ranks_that_agree() -> None:
    posts = {rank: facts(row("a"), row("b")) for rank in ALL}
    assert differ(posts) == {"alike": True}


def test_the_few_ranks_that_differ_are_named() -> None:
    posts = {rank: facts(row("a"), row("b")) for rank in ALL} | {2: facts(row("a"))}
    assert differ(posts) == {"alike": False}
    assert "got layer b, tensor activation not on rank 2; ranks that" in explain(posts)["error"]
    posts = {rank: facts(row("a")) for rank in ALL} | {3: facts(row("a"), row("b"))}
    assert "got layer b, tensor activation only on rank 3; ranks that" in explain(posts)["error"]


def test_many_differences_are_counted() -> None:
    posts = {0: facts(*map(row, "abcde"), group=(0, 1)), 1: facts(group=(0, 1))}
    assert "layer c, tensor activation, and 2 more only on rank 0" in explain(posts)["error"]


@pytest.mark.parametrize("layers", [["b"], ["b.fc1", "b"], []])
def test_ranks_learn_of_layers_that_they_have(layers: list[str]) -> None:
    posts = {0: facts(row("b.fc1"), group=(0, 1)), 1: facts(group=(0, 1), layers=layers)}
    verdict = explain(posts)
    assert bool(verdict["error"]) is not bool(layers)
    if layers:
        assert verdict["rows"] == {0: (row("b.fc1"),), 1: ()}


def test_ranks_do_not_learn_of_weights() -> None:
    rows = row("a", "weight")
    posts = {0: facts(rows, group=(0, 1)), 1: facts(group=(0, 1), layers=["a"])}
    assert "layer a, tensor weight only on rank 0" in explain(posts)["error"]


def test_groups_of_weights_are_compared_among_their_ranks() -> None:
    """There are two tensor-parallel groups, each with its own weights."""
    posts = {}
    for rank in ALL:
        own = "0,1" if rank < 2 else "2,3"
        posts[rank] = facts(digests={"0,1,2,3": 7, own: rank // 2})
    assert differ(posts) == {"alike": True}
    posts[3]["digests"]["2,3"] = 9
    assert differ(posts) == {"alike": False}


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (["matmul"], ()),
        (["replicated", "matmul"], ("activation",)),
        (["norm", "gather", "matmul"], ("activation",)),
        (["matmul", "reduce"], ("gradient",)),
        (["norm", "matmul", "activation", "matmul", "reduce_scatter"], ()),
    ],
)
def test_collectives_say_what_ranks_have_alike(behind: list[str], expected: tuple) -> None:
    stages = [SimpleNamespace(label=label, name="") for label in behind]
    next(stage for stage in stages if stage.label == "matmul").name = "layer.fc1"
    assert replicated_tensors(stages, "layer.fc1") == expected
