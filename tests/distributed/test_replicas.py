"""DistributedDataParallel: two ranks give the results of one process."""

from typing import Any

import pytest
from ranks import run_ranks
from replica_ranks import OPTIONS, replicas
from replica_reference import PAIRS, RECIPES

# Relative difference of the losses from those of the whole batch: one GEMM rounds its sums
# differently, and scales are those of the whole batch instead of its halves.
BOUNDS = {"bf16": 1e-4, "delayed": 1e-3, "current": 1e-2, "block": 1e-3}
CASES = [f"{layer} {precision}" for layer, precision in PAIRS]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Returns the results of every case, for each rank."""
    return run_ranks(2, replicas)


@pytest.mark.parametrize("case", [*CASES, *OPTIONS, *(f"accumulated {one}" for one in RECIPES)])
def test_ranks_find_what_one_process_finds(found, case: str) -> None:
    for outcome in found:
        assert outcome[case]["losses"] == outcome[case]["expected"]
        assert outcome[case]["differences"] == []  # parameters, scales, histories


@pytest.mark.parametrize("precision", RECIPES)
def test_losses_are_near_those_of_the_whole_batch(found, precision: str) -> None:
    for outcome in found:
        assert outcome[f"whole {precision}"] < BOUNDS[precision]


def test_buckets_are_reduced_while_the_backward_runs(found) -> None:
    """If the GPU is the bottleneck, buckets are reduced during the backward of a layer.

    Otherwise the layer runs as one node, and its buckets are reduced after it.
    """
    for outcome in found:
        *buckets, total = outcome["large buckets"]
        assert len(buckets) > 4
        assert set(buckets) == {4, 6, 8}  # after both GEMMs of MLP, projection, QKV
        assert buckets == sorted(buckets)
        assert total == 8
        assert set(outcome["small buckets"]) == {8}
