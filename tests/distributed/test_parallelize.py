"""`te.parallelize`: two ranks share a model that is built, beside the same model in one process."""

import pytest
from parallelize_ranks import SCENARIOS, scenarios
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)  # starting processes takes long on a busy machine


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What each rank found wrong, by scenario."""
    return run_ranks(2, scenarios, backend=request.param)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_share_a_built_model(found: list[dict[str, str]], scenario: str) -> None:
    for outcome in found:
        assert not outcome[scenario], outcome[scenario]
