"""Amaxes are reduced over the ranks of `fp8_group`: two processes over gloo, on the CPU."""

import torch
import torch.multiprocessing as mp
from amax_ranks import run_rank


def test_ranks_agree_on_scales(tmp_path) -> None:
    mp.spawn(run_rank, (str(tmp_path / "store"), str(tmp_path / "result")), nprocs=2)
    reduced, own = zip(*(torch.load(tmp_path / f"result.{rank}") for rank in range(2)), strict=True)
    assert reduced == ((448.0 / 2, 57344.0 / 2),) * 2
    assert own == ((448.0, 57344.0 / 2), (448.0 / 2, 57344.0))
