"""Norms of distributed gradients, steps with the clip factor, and sums over tokens."""

import pytest
from clip_ranks import SCENARIOS, scenarios
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)  # starting processes takes long on a busy machine
BACKENDS = [
    ("gloo", 4),
    pytest.param(("nccl", 2), marks=pytest.mark.multi_gpu),
    pytest.param(("nccl", 4), marks=pytest.mark.multi_gpu(4)),
]


@pytest.fixture(scope="module", params=BACKENDS, ids=str)
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Returns for each rank the traceback of each scenario that failed, "" where it passed."""
    backend, ranks = request.param
    return run_ranks(ranks, scenarios, backend=backend)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_find_what_is_true_of_whole_gradients(
    found: list[dict[str, str]], scenario: str
) -> None:
    for outcome in found:
        assert not outcome[scenario], outcome[scenario]
