"""What is around layers that ranks share: wrappers, options of state dicts, ties, attributes."""

import pytest
from ranks import run_ranks
from sharing_ranks import SCENARIOS, scenarios


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Returns for each rank the traceback of each scenario that failed, or ""."""
    return run_ranks(2, scenarios, backend=request.param)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks(found: list[dict[str, str]], scenario: str) -> None:
    assert [one[scenario] for one in found] == [""] * 2
