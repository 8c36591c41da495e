"""The debugger on two ranks: statistics over ranks, modified tensors, and errors.

Ranks log what they see as one tensor and modify tensors alike. Where they differ, each of them
raises an error that says how.
"""

import math

import pytest
import torch
from debug_rank_cases import TOKENS, batch, part_of
from debug_shared_layers import tensors
from statistics_reference import assert_statistics, reference


def both(outcomes, session: str):
    return [outcome[session] for outcome in outcomes]


def assert_alike(found, expected, rtol: float = 1e-6) -> None:
    """Asserts equal statistics of the same tensors, up to the order of sums."""
    assert set(found) == set(expected)
    for key, values in expected.items():
        assert list(found[key]) == list(values)
        for name, value in values.items():
            # The smallest element is what is left of sums whose terms nearly cancel.
            least = 1e-8 if name != "dynamic_range" else 1e3 * rtol
            close = math.isclose(found[key][name], value, rel_tol=rtol, abs_tol=least)
            assert close, f"{key} {name}: {found[key][name]} instead of {value}"


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_halves_of_a_batch_are_logged_as_the_whole(outcomes, precision: str) -> None:
    for outcome in both(outcomes, "halves_and_whole"):
        halves, whole = outcome[precision]
        assert len(halves) == 2 * 5
        assert_alike(halves, whole, rtol=1e-5)  # a GPU uses another kernel for half the rows
        if precision == "delayed":
            lost = [halves[step, "layer", "gradient"]["underflows%"] for step in range(2)]
            assert all(0 < share < 100 for share in lost)


def test_ranks_log_the_same(outcomes) -> None:
    first, second = both(outcomes, "halves_and_whole")
    activations = [outcome["bf16"][0][1, "layer", "activation"] for outcome in (first, second)]
    assert activations[0] == activations[1]


def test_fp8_statistics_of_ranks_with_scales_of_their_own(outcomes) -> None:
    """Percentages and errors are means over equal halves; scales have a minimum and a maximum."""
    together = both(outcomes, "fp8_of_each")[0][0]
    alone = [outcome[1] for outcome in both(outcomes, "fp8_of_each")]
    for key, found in together.items():
        parts = [logged[key] for logged in alone]
        assert parts[0]["scale_inv_max"] != parts[1]["scale_inv_max"]
        for name, value in found.items():
            merge = {"scale_inv_min": min, "scale_inv_max": max}.get(name, lambda x: sum(x) / 2)
            assert math.isclose(value, merge([p[name] for p in parts]), rel_tol=1e-9)


def test_shards_are_cast_by_the_amax_of_the_whole(outcomes) -> None:
    for found, expected in both(outcomes, "shards"):
        assert_alike(found, expected)
        assert found[0, "layer", "weight"]["fp8_current_scaling_underflows%"] > 0


@pytest.mark.parametrize("beside", ["", " beside DumpTensors"])
@pytest.mark.parametrize("way", ["column False", "column True", "row False", "row True"])
def test_layers_that_ranks_share_are_logged_as_the_whole(outcomes, way: str, beside: str) -> None:
    """Except for partial sums, which a collective after the GEMM completes."""
    weight, x, grad = tensors()
    columns = way.startswith("column")
    pieces = zip(
        *(t.chunk(2, 0 if columns and t is weight else 1) for t in (weight, x, grad)), strict=True
    )
    if columns:
        summed, parts = "dgrad", [g @ w for w, _, g in pieces]
    else:
        summed, parts = "output", [a @ w.T for w, a, _ in pieces]
    for found in both(outcomes, "shared_layers"):
        logged, whole = found[way + beside], found["whole"]
        own = logged.pop((0, "layer", summed))
        assert_alike(logged, {k: v for k, v in whole.items() if k[2] != summed}, rtol=1e-5)
        expected = torch.stack(parts)
        for name, value in (
            ("l1_norm", expected.abs().sum()),
            ("max", expected.max()),
            ("min", expected.min()),
        ):
            assert own[name] == pytest.approx(float(value), rel=1e-4)


@pytest.mark.parametrize("layer", ["mlp", "row"])
def test_compiled_layers_that_ranks_share_log_what_eager_ones_do(outcomes, layer: str) -> None:
    for outcome in both(outcomes, "compiled_shared_layers"):
        eager, compiled = outcome[layer]
        assert len(eager) == 2 * 6 * (2 if layer == "mlp" else 1)
        assert_alike(compiled, eager)


def test_features_that_look_at_a_gathered_norm_change_no_bit(outcomes) -> None:
    """The norm rounds to FP8 once, from fp32, though features look at its result in bf16."""
    for found in both(outcomes, "gathered_norms"):
        assert len(found) == 2 * 5
        assert [case for case, same in found.items() if not all(same)] == []


def test_copies_of_a_tensor_count_once(outcomes) -> None:
    for found in both(outcomes, "copies"):
        assert_statistics(found[0, "layer", "activation"], reference(batch(0)[0]))


@pytest.mark.parametrize("feature", ["FakeQuant", "PerTensorScaling"])
def test_ranks_that_share_a_tensor_scale_it_alike(outcomes, feature: str) -> None:
    for rank, outcome in enumerate(both(outcomes, "modified")):
        shared, own, whole = outcome[feature]
        for x, alone, expected in zip(shared, own, whole, strict=True):
            assert x.shape[0] == TOKENS // 2
            torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-7)
            if rank == 0:  # this half is smaller, so its own scale differs
                assert not torch.allclose(alone, expected, rtol=1e-5, atol=1e-7)


def test_stages_of_a_pipeline_have_groups_of_their_own(outcomes) -> None:
    for rank, found in enumerate(both(outcomes, "pipeline")):
        assert {layer for _, layer, _ in found} == {f"stage{rank}"}
        assert_statistics(found[1, f"stage{rank}", "activation"], reference(batch(1)[0]))


def test_a_reduction_group_has_this_rank(outcomes) -> None:
    for same, (of_others, of_two_dimensions) in both(outcomes, "meshes_and_other_groups"):
        assert same
        assert "expected group to have this rank as a member" in of_others
        assert "a DeviceMesh of one dimension or None, got DeviceMesh" in of_two_dimensions


def test_layers_that_have_names_need_not_run_on_all_ranks(outcomes) -> None:
    """Ranks that run a layer log it; other ranks add no elements, from their first step on."""
    first, second = both(outcomes, "experts")
    shared = {0: [1.0, 11.0]}
    expected = {
        (step, f"model.{i}"): [1.0 + i] for step in range(3) for i in range(1, 2 + bool(step))
    }
    expected |= {(step, f"model.{i}"): shared[i] for step in range(2) for i in shared}
    expected |= {(2, "model.0"): [1.0], (2, "model.1"): [2.0, 12.0]}
    for (step, layer), values in expected.items():
        parts = [torch.full((4, 16), value) for value in values]
        assert_statistics(first[step, layer, "activation"], reference(*parts))
    assert len(first) == len(expected)
    assert all(first[key] == values for key, values in second.items())


def test_what_is_evaluated_between_two_steps_counts_in_neither(outcomes) -> None:
    for found in both(outcomes, "evaluation"):
        norms = [found[step, "layer", "activation"]["l1_norm"] for step in range(2)]
        assert norms == [64.0 * (1 + 2), 64.0 * (2 + 3)]


def test_every_rank_writes_files_and_a_group_is_one_row(outcomes) -> None:
    for files, rows in both(outcomes, "files_and_summary"):
        assert files == [
            *(f"nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-{r}.log" for r in range(2)),
            *(
                f"nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-{r}.log"
                for r in range(2)
            ),
            *(f"statistics_rank-{r}.jsonl" for r in range(2)),
        ]
        assert sorted(rows) == [
            ["layer", "activation", "max", "0-1", "1"],
            ["layer", "weight", "max", "1", "2"],
        ]


@pytest.mark.parametrize(
    ("session", "words"),
    [
        ("another_config", ["got configuration", "of look (rank 0), ", "of look (rank 1)"]),
        ("another_group", ["got reduction group", "(rank 0), the default of ranks 0, 1 (rank 1)"]),
        ("another_iteration", ["got iteration 0 (rank 0), 7 (rank 1)"]),
        (
            "another_layer",
            ["layer a, tensor activation only on rank 0; layer b, tensor", "only on rank 1"],
        ),
        ("another_layer_later", ["layer late, tensor activation only on rank 0"]),
        ("another_weight", ["layer layer, tensor weight only on rank 0"]),
        ("a_rank_that_never_steps", ["step() of iteration 0, but rank 1 did not come within 1 s"]),
        (
            "another_modification",
            ["layer a, gemm fprop", "(rank 0)", "layer b, gemm fprop", "(rank 1)"],
        ),
    ],
)
def test_ranks_that_differ_end_in_an_error_on_both(
    outcomes, session: str, words: list[str]
) -> None:
    for said in both(outcomes, session):
        for word in words:
            assert word in said


def test_a_rank_that_leaves_out_a_step_is_named(outcomes) -> None:
    waited, left_out = both(outcomes, "a_rank_that_stops")
    if waited or left_out:  # gloo
        assert "step() of iteration 1, but rank 1 did not come within 1 s" in waited
        assert "rank 0 waits in step() of iteration 1, and gave up" in left_out


def test_a_session_that_a_rank_lacked_leaves_nothing_behind(outcomes) -> None:
    waited, others = both(outcomes, "a_session_of_one_rank")
    if waited or others:  # gloo
        assert "step() of iteration 0, but rank 1 did not come within 1 s" in waited[0]
        assert [*waited[1:], *others] == ["", "", ""]


def test_failures_leave_nothing_behind(outcomes) -> None:
    assert both(outcomes, "a_session_afterwards") == ["", ""]


def test_parts_make_up_the_batch() -> None:
    tokens = torch.arange(TOKENS)
    assert torch.equal(torch.cat([tokens[part_of(rank)] for rank in range(2)]), tokens)
