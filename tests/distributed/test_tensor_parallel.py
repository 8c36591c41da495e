"""Tensor-parallel modules give the results of one process on the gathered tensors."""

import pytest
from peer_messages import matrix_in_parts, tensors_left, weights_in_fp8
from ranks import run_ranks
from tensor_parallel_ranks import MODULES, Case, bound, cases, matrix
from tensor_parallel_scenarios import SCENARIOS, scenarios

WORLDS = [
    (2, "gloo"),
    (4, "gloo"),
    pytest.param((2, "nccl"), marks=pytest.mark.multi_gpu),
    pytest.param((4, "nccl"), marks=pytest.mark.multi_gpu(4)),
]


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def differences(request) -> tuple[int, str, list[dict[Case, dict[str, float]]]]:
    """Returns the number of ranks, the backend, and the differences that each rank found."""
    ranks, backend = request.param
    return ranks, backend, run_ranks(ranks, matrix, cases(ranks), backend=backend)


@pytest.mark.parametrize("name", MODULES)
def test_ranks_agree_with_one_process(name, differences) -> None:
    ranks, backend, found_by_rank = differences
    for case in cases(ranks):
        for found in found_by_rank if case[0] == name else []:
            assert found[case], "nothing was compared"
            for tensor, apart in found[case].items():
                assert apart <= bound(case, backend), (case, tensor, apart)


IN_PARTS = ("row", "mlp swiglu", "attention", "layer", "layer, parallel blocks")


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_parts_agree_with_one_process(world) -> None:
    ranks, backend = world
    shared = [case for case in cases(ranks) if case[0] in IN_PARTS and case[1]]
    for found, parts in run_ranks(ranks, matrix_in_parts, shared, backend=backend):
        assert parts > 50 or backend == "nccl"
        for case, tensors in found.items():
            for tensor, apart in tensors.items():
                assert apart <= bound(case, backend), (case, tensor, apart)


@pytest.mark.parametrize("world", [WORLDS[0], WORLDS[2]], ids=str)
def test_parts_are_multiplied_by_weights_in_fp8(world) -> None:
    ranks, backend = world
    for found, columns in run_ranks(ranks, weights_in_fp8, backend=backend):
        assert max(found) < 0.02
        assert columns > 0


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_tensors_in_parts_are_freed_at_once(world) -> None:
    """They are freed without the garbage collector, so they are in no reference cycle."""
    ranks, backend = world
    for left in run_ranks(ranks, tensors_left, backend=backend):
        assert left <= 0


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, object]]:
    """Returns for each of two ranks the traceback of each scenario that failed, or ""."""
    return run_ranks(2, scenarios)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, outcomes) -> None:
    assert [found[name] for found in outcomes] == ["", ""]
