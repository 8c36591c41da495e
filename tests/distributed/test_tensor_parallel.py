"""Modules that ranks share do what they do in one process, on the gathered tensors."""

import pytest
from peer_messages import matrix_in_parts
from ranks import run_ranks
from tensor_parallel_ranks import MODULES, Case, bound, cases, matrix
from tensor_parallel_scenarios import SCENARIOS, scenarios

pytestmark = pytest.mark.timeout(240)  # the first test waits for all cases
WORLDS = [(2, "gloo"), (4, "gloo"), pytest.param((2, "nccl"), marks=pytest.mark.multi_gpu)]


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def differences(request) -> tuple[int, str, list[dict[Case, dict[str, float]]]]:
    """How many ranks there are, what joins them, and what each of them found."""
    ranks, backend = request.param
    return ranks, backend, run_ranks(ranks, matrix, cases(ranks), backend=backend)


@pytest.mark.parametrize("name", MODULES)
def test_ranks_agree_with_one_process(name, differences) -> None:
    ranks, backend, found_by_rank = differences
    for case in cases(ranks):
        for found in found_by_rank if case[0] == name else []:
            assert found[case], "nothing was compared"
            for tensor, apart in found[case].items():
                assert apart <= bound(case, backend), (case, tensor, apart)


@pytest.fixture(scope="module", params=(2, 4))
def in_parts(request) -> tuple[int, list[tuple[dict[Case, dict[str, float]], int]]]:
    """The same where collectives go part by part, and how many parts came."""
    ranks = request.param
    shared = [case for case in cases(ranks) if case[2]]
    return ranks, run_ranks(ranks, matrix_in_parts, shared)


def test_parts_agree_with_one_process(in_parts) -> None:
    _, outcomes = in_parts
    for found, parts in outcomes:
        assert parts > 50
        for case, tensors in found.items():
            for tensor, apart in tensors.items():
                assert apart <= bound(case, "gloo"), (case, tensor, apart)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, object]]:
    """Of each of two ranks: what scenarios found wrong, by name."""
    return run_ranks(2, scenarios)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, outcomes) -> None:
    assert [found[name] for found in outcomes] == ["", ""]
