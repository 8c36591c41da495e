"""Layers that ranks share as one node of autograd's graph: the same bits as part by part."""

from typing import Any

import pytest
from fused_ranks import both_ways, cases
from ranks import run_ranks


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[Any, str]]:
    """Of each rank."""
    return run_ranks(2, both_ways, backend=request.param)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_both_ways_give_the_same_bits(found, case) -> None:
    assert [outcome[case] for outcome in found] == ["", ""]
