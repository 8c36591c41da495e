"""fully_shard and FullyShardedDataParallel: two ranks give the results of one process."""

from typing import Any

import pytest
from ranks import run_ranks
from replica_reference import PAIRS, RECIPES
from shard_ranks import FLAT, OPTIMIZERS, hybrid, initial_values, shards, uneven

CASES = [f"{layer} {precision}" for layer, precision in PAIRS]
IN_FP8 = [f"{case}, FP8 weights" for case in CASES if not case.endswith("bf16")]
FLAT_CASES = [f"flat {a} {b} {original}" for a, b in FLAT for original in (True, False)]
STEPPED = [
    f"{name}{weights}"
    for name in OPTIMIZERS
    for weights in ("", ", FP8 weights")
    if weights or not name.startswith("SGD")
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Returns the results of every case, for each rank."""
    return run_ranks(2, shards)


@pytest.mark.parametrize("case", [*CASES, *IN_FP8, *FLAT_CASES, *STEPPED, "kept"])
def test_ranks_find_what_one_process_finds(found, case: str) -> None:
    for outcome in found:
        assert outcome[case]["losses"] == outcome[case]["expected"]
        different = outcome[case]["differences"]
        if "block, FP8" in case:  # no rank has all scales: see `fp8.weights.scales_of`
            different = [name for name in different if not name.endswith("_extra_state")]
        assert different == []


@pytest.mark.parametrize("precision", RECIPES)
def test_fp32_parameters_are_gathered_in_bf16(found, precision: str) -> None:
    for outcome in found:
        losses = outcome[f"mixed {precision}"]
        assert losses["losses"] == losses["expected"]


def test_fp8_weights_are_gathered_as_bytes(found) -> None:
    for outcome in found:
        assert outcome["bytes"][True] * 2 == outcome["bytes"][False]


def test_one_collective_finds_the_scales_of_all_weights(found) -> None:
    for outcome in found:
        assert outcome["collectives"]["FusedAdam"] == outcome["collectives"]["AdamW fused"] == 1


@pytest.mark.parametrize("capturable", [False, True])
def test_gradients_are_clipped_to_the_norm_of_all_ranks(found, capturable: bool) -> None:
    for outcome in found:
        clipped = outcome["clipped"][capturable]
        for what in ("norm", "weight"):
            assert clipped[f"cut {what}"] == pytest.approx(clipped[f"whole {what}"], rel=1e-5)


@pytest.mark.parametrize("fp8_weights", [False, True])
def test_a_layer_may_be_cut_on_meta(found, fp8_weights: bool) -> None:
    for outcome in found:
        made = outcome["from meta"][fp8_weights]
        assert made["kind"] == ("Float8Tensor" if fp8_weights else "Tensor")
        assert made["std"] == pytest.approx(0.023, rel=0.05)
        assert made["norm"] == 1.0
        assert 0.1 < made["loss"] < 1.0


@pytest.mark.parametrize("broadcast", [False, True])
def test_whole_tensors_are_loaded_into_pieces(found, broadcast: bool) -> None:
    """By `full_state_dict` of `set_model_state_dict`, which writes to the pieces itself."""
    for outcome in found:
        assert outcome["whole state"][broadcast] < 1e-7


def test_errors_name_the_weight(found) -> None:
    for outcome in found:
        assert "a piece of weight of layer" in outcome["errors"]["too early"]
        assert "got 64 of 128 rows: those of weight of layer small" in outcome["errors"]["blocks"]


def test_slices_of_pieces_are_not_written_alone(found) -> None:
    for outcome in found:
        assert outcome["slices"]["kept"]
        assert "written as a whole, got a slice of" in outcome["slices"]["error"]


def test_masters_start_with_the_values_before_the_cast() -> None:
    """This holds for layers that are sharded with memory, and for layers on meta."""
    for outcome in run_ranks(2, initial_values):
        assert len(outcome) == 4
        assert all(all(answers) for answers in outcome.values()), outcome


def test_pieces_may_differ_in_their_rows() -> None:
    assert run_ranks(5, uneven) == [{32: True, 16: True}] * 5


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu(4))])
def test_replicas_of_shards_find_what_one_process_finds(backend: str) -> None:
    for outcome in run_ranks(4, hybrid, backend=backend):
        for case in outcome.values():
            assert case["losses"] == case["expected"]
            assert case["differences"] == []
