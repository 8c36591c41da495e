"""What two ranks have found, for all tests here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_rank, start_ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a file waits for what ranks do for all, which other processes may delay."""
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """Of each rank: what scenarios gave, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (request.param, str(folder / "store"), str(folder / "result"))
    start_ranks(run_rank, arguments, 2, request.param)
    return [torch.load(folder / f"result.{rank}") for rank in range(2)]
