"""Collectives as operations, and linear layers that two ranks share, against one process."""

import copy
import pickle

import pytest
import torch
from ops_ranks import SCENARIOS, outcomes
from ranks import run_ranks

from transformer_engine.pytorch import ops


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """The outcomes of each rank."""
    return run_ranks(2, outcomes, backend=request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(found: list[dict[str, str]], name: str) -> None:
    for outcome in found:
        assert not outcome[name], outcome[name]


@pytest.mark.parametrize("kind", [ops.AllGather, ops.ReduceScatter, ops.AllReduce])
def test_one_rank_is_the_identity(kind: type[ops.FusibleOperation]) -> None:
    x = torch.randn(4, 2)
    for operation in (kind(), copy.deepcopy(kind()), pickle.loads(pickle.dumps(kind()))):
        assert operation(x) is x


@pytest.mark.parametrize("kind", [ops.AllGather, ops.ReduceScatter, ops.AllReduce])
def test_copies_keep_hooks(kind: type[ops.FusibleOperation]) -> None:
    operation, seen = kind().eval(), []
    operation.register_forward_hook(lambda *_: seen.append(1))
    for one in copy.deepcopy([operation, operation]):
        assert not one.training
        one(torch.ones(2))
    assert len(seen) == 2


@pytest.mark.parametrize("kind", [ops.AllGather, ops.ReduceScatter, ops.AllReduce])
def test_refusals(kind: type[ops.FusibleOperation]) -> None:
    with pytest.raises(TypeError, match=rf"\[{kind.__name__}\] expected process_group to be a"):
        kind("group")
    with pytest.raises(TypeError, match=rf"\[{kind.__name__}\] expected x to be a torch.Tensor"):
        kind()(None)
    with pytest.raises(ValueError, match=rf"\[{kind.__name__}\] expected x of shape \(rows, ...\)"):
        kind()(torch.ones(()))
