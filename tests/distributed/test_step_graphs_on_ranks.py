"""Training steps under DistributedDataParallel and fully_shard, each captured as one CUDA graph.

A graph contains everything from the forward to the optimizer.
"""

from typing import Any

import pytest
from ranks import run_ranks
from replica_reference import RECIPES
from step_graph_ranks import WAYS, step_graphs

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def found() -> list[dict[Any, list[list[float]]]]:
    """Returns the losses of every case, for each rank."""
    return run_ranks(2, step_graphs, backend="nccl")


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_graphs_give_the_losses_of_eager_steps(found, way: str, precision: str) -> None:
    for outcome in found:
        eager, captured = outcome[way, precision]
        assert captured == eager
        assert len(set(eager)) == len(eager), "steps have different data"
