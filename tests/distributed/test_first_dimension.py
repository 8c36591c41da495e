"""Collectives along the first dimension, which programs call themselves."""

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
