"""Layers that ranks share, in CUDA graphs: collectives are captured and replayed with the rest.

On CPUs `make_graphed_callables` gives the layer back; there the test is that nothing refuses it.
"""

from typing import Any

import pytest
from graph_ranks import CASES, graphs
from ranks import run_ranks


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[Any, bool]]:
    """Of each rank."""
    return run_ranks(2, graphs, backend=request.param)


@pytest.mark.parametrize(("precision", "sequence"), CASES)
def test_graphs_give_the_bits_of_eager_mode(found, precision: str, sequence: bool) -> None:
    assert [outcome[precision, sequence] for outcome in found] == [True, True]
