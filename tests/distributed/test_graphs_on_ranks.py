"""Tensor-parallel layers in CUDA graphs, whose collectives are captured and replayed.

On CPUs `make_graphed_callables` returns the layer itself, and the test checks that it raises no
error.
"""

from typing import Any

import pytest
from graph_ranks import CASES, graphs
from ranks import run_ranks


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[Any, bool]]:
    """Returns for each rank whether graphs give the bits of eager mode."""
    return run_ranks(2, graphs, backend=request.param)


@pytest.mark.parametrize(("precision", "sequence"), CASES)
def test_graphs_give_the_bits_of_eager_mode(found, precision: str, sequence: bool) -> None:
    assert [outcome[precision, sequence] for outcome in found] == [True, True]
