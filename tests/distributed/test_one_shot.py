"""One-shot collectives between processes: results, and the error when a rank has ended."""

from pathlib import Path

import pytest
from one_shot_ranks import all_of_them, ends_early, without
from ranks import FORKED, run_ranks


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [(2, "gloo"), (3, "gloo"), pytest.param(2, "nccl", marks=pytest.mark.multi_gpu)],
)
def test_all_give_what_they_are_defined_to(ranks: int, backend: str) -> None:
    assert run_ranks(ranks, all_of_them, backend=backend) == [[]] * ranks


def test_they_may_be_switched_off() -> None:
    assert run_ranks(2, without) == [[], []]


def test_a_rank_that_has_ended_is_named(tmp_path: Path) -> None:
    outcome = tmp_path / "error"
    arguments = (str(tmp_path / "store"), str(outcome))
    ranks = [FORKED.Process(target=ends_early, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(60)
    for process in ranks:
        process.kill()
    expected = "[one_shot] expected rank 1 of the group to take part in a collective, but its"
    assert outcome.read_text().startswith(expected)
