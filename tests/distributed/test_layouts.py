"""Checkpoints of torch.distributed.checkpoint: saved under one layout, loaded under another."""

from typing import Any

import pytest
from layout_ranks import PRECISIONS, layouts
from ranks import run_ranks

CASES = [f"{precision}{', FP8 weights' if fp8 else ''}" for precision, fp8 in PRECISIONS]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Returns the losses of every case, for each rank."""
    return run_ranks(2, layouts)


@pytest.mark.parametrize("case", CASES)
def test_another_layout_goes_on_as_if_never_stopped(found, case: str) -> None:
    for outcome in found:
        losses, expected = outcome[case]
        assert losses == expected
        assert losses[-1] < 0.9 * losses[0]
