"""Collectives along the first dimension, which users call directly."""

import torch


def test_sums_gathers_and_scatters(outcomes) -> None:
    own = [torch.arange(8.0).view(4, 2) + 10.0 * rank for rank in range(2)]
    for rank, outcome in enumerate(outcomes):
        found = outcome["along_the_first_dimension"]
        assert found["number"] == (rank, 2)
        for later in (False, True):
            assert torch.equal(found[f"sum {later}"], own[0] + own[1])
            assert torch.equal(found[f"gather {later}"], torch.cat([x.t() for x in own]))
            assert torch.equal(found[f"scatter {later}"], (own[0] + own[1]).chunk(2)[rank])
        kind, values = found["quantized"]
        assert kind and torch.allclose(values, torch.cat(own), rtol=0.07)
        assert "expected rows divisible by 2 ranks, got (3, 2)" in found["error"]


def test_the_debugger_gathers_unequal_sizes(outcomes) -> None:
    own = [torch.arange(8.0).view(4, 2) + 10.0 * rank for rank in range(2)]
    expected = [torch.cat((own[0][:m], own[1][:n])) for m, n in ((4, 4), (1, 4), (3, 0))]
    for rank, outcome in enumerate(outcomes):
        found = outcome["along_the_first_dimension"]["unequal"]
        assert all(map(torch.equal, found[:3], expected))
        if rank == 0:
            assert found[3:] == [None] * 3
        else:
            assert all(map(torch.equal, found[3:], expected))
