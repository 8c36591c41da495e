"""`distribute_saved_activations`: each rank saves a part of the input."""

import torch
from checkpoint_ranks import expected


def test_each_rank_keeps_its_part(outcomes) -> None:
    for rank, outcome in enumerate(outcomes):
        found = outcome["kept_parts"]
        assert torch.equal(found["default group"], expected(0, 1))
        assert torch.equal(found["group"], expected(0, 1))
        assert torch.equal(found["one rank"], expected(rank, rank))
        assert torch.equal(found["not reentrant"], expected(rank, rank))
