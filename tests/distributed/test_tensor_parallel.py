"""Modules that ranks share do what they do in one process, on the gathered tensors."""

import pytest
from spawned_ranks import spawned
from tensor_parallel_ranks import MODULES, Case, bound, cases, matrix
from tensor_parallel_scenarios import SCENARIOS, scenarios

pytestmark = pytest.mark.timeout(240)  # the first test waits for all cases
RANKS = (2, 4)


@pytest.fixture(scope="module", params=RANKS)
def differences(tmp_path_factory, request) -> tuple[int, list[dict[Case, dict[str, float]]]]:
    """How many ranks there are, and what each of them found."""
    ranks = request.param
    return ranks, spawned(tmp_path_factory.mktemp("tp"), ranks, matrix, cases(ranks))


@pytest.mark.parametrize("name", MODULES)
def test_ranks_agree_with_one_process(name, differences) -> None:
    ranks, found_by_rank = differences
    for case in cases(ranks):
        for found in found_by_rank if case[0] == name else []:
            assert found[case], "nothing was compared"
            for tensor, apart in found[case].items():
                assert apart <= bound(case), (case, tensor, apart)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, object]]:
    """Of each of two ranks: what scenarios found wrong, by name."""
    return spawned(tmp_path_factory.mktemp("tp"), 2, scenarios)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, outcomes) -> None:
    assert [found[name] for found in outcomes] == ["", ""]
