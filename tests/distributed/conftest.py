"""What two ranks have found, for all tests here."""

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from ranks import run_rank


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """Of each rank: what scenarios gave, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, (request.param, str(folder / "store"), str(folder / "result")), nprocs=2)
    return [torch.load(folder / f"result.{rank}") for rank in range(2)]
