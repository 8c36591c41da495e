"""Stages of a model on two ranks: several forwards before the first backward."""

from typing import Any

import pytest
from pipeline_ranks import MICRO_BATCHES, STEPS, pipeline
from ranks import run_ranks
from replica_reference import RECIPES


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Returns the results of every precision, for each rank."""
    return run_ranks(2, pipeline)


@pytest.mark.parametrize("precision", RECIPES)
def test_stages_find_what_one_process_finds(found, precision: str) -> None:
    for outcome in found:
        assert outcome[precision]["losses"] == outcome[precision]["expected"]
        assert outcome[precision]["differences"] == []  # parameters, scales, histories
    assert len(set(found[1][precision]["losses"])) == MICRO_BATCHES * STEPS
