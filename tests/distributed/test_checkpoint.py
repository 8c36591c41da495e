"""`distribute_saved_activations`: two processes over gloo, on the CPU."""

import torch
import torch.multiprocessing as mp
from checkpoint_ranks import expected, run_rank


def test_each_rank_keeps_its_part(tmp_path) -> None:
    mp.spawn(run_rank, (str(tmp_path / "store"), str(tmp_path / "result")), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"result.{rank}")
        assert torch.equal(found["default group"], expected(0, 1))
        assert torch.equal(found["group"], expected(0, 1))
        assert torch.equal(found["one rank"], expected(rank, rank))
        assert torch.equal(found["not reentrant"], expected(rank, rank))
