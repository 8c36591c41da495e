"""What two ranks have found, for all tests here."""

from typing import Any

import pytest
import torch
from ranks import run_rank, start_ranks


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """Of each rank: what scenarios gave, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (request.param, str(folder / "store"), str(folder / "result"))
    start_ranks(run_rank, arguments, 2, request.param)
    return [torch.load(folder / f"result.{rank}") for rank in range(2)]
