"""Runs the scenarios of two ranks once, for all tests of this directory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_rank, start_ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests a long timeout: the first one of a file waits for the scenarios on all ranks."""
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """Returns for each rank the results of the scenarios, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (request.param, str(folder / "store"), str(folder / "result"))
    start_ranks(run_rank, arguments, 2, request.param)
    return [torch.load(folder / f"result.{rank}") for rank in range(2)]
