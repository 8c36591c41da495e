"""Tensor-parallel layers that run as one autograd node give the same bits as part by part."""

import pytest
from fused_ranks import both_ways, cases
from ranks import run_ranks


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def test_both_ways_give_the_same_bits(backend: str) -> None:
    for found in run_ranks(2, both_ways, backend=backend):
        assert list(found) == cases(most=backend == "nccl")
        assert {case: wrong for case, wrong in found.items() if wrong} == {}
