"""Reading log directories: ranks, damaged lines, values that are not numbers, missing files."""

import json
import math
from pathlib import Path

import pytest
from synthetic_run import layer_names, record, write_records, write_run, write_series

from nvdlfw_inspect.report import records
from nvdlfw_inspect.report.records import Key, LogError, common_prefix, read_run
from nvdlfw_inspect.report.statistic import Statistic

KEY = Key("model.0.fc1", "gradient", "cur_amax")


def test_values_and_steps(tmp_path: Path) -> None:
    run = read_run(write_series(tmp_path, [1.5, -2.0, 3]))
    assert list(run.series[KEY][0].steps) == [0, 1, 2]
    assert list(run.series[KEY][0].values) == [1.5, -2.0, 3.0]
    assert (run.records, run.skipped, run.ranks, run.steps) == (3, 0, [0], [0, 1, 2])


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    values = read_run(write_series(tmp_path, [math.nan, math.inf, -math.inf])).series[KEY][0].values
    assert math.isnan(values[0])
    assert list(values[1:]) == [math.inf, -math.inf]


def test_null_is_an_empty_tensor_and_no_value(tmp_path: Path) -> None:
    run = read_run(write_series(tmp_path, [1.0, None, 2.0]))
    assert list(run.series[KEY][0].steps) == [0, 2]
    assert run.empty == 1


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_truncated_last_line_is_skipped_and_counted(tmp_path: Path, cut: int) -> None:
    whole = json.dumps(record(2, *KEY, 9.0))
    write_records(tmp_path, [record(i, *KEY, 1.0) for i in range(2)], tail=whole[:cut])
    run = read_run(tmp_path)
    assert (run.records, run.skipped) == (2, 1)


def test_run_that_goes_on_after_a_truncated_line(tmp_path: Path) -> None:
    whole = json.dumps(record(1, *KEY, 9.0))
    tail = f"{whole[:30]}{whole}\n{json.dumps(record(2, *KEY, 2.0))}\n"
    run = read_run(write_records(tmp_path, [record(0, *KEY, 1.0)], tail=tail))
    assert list(run.series[KEY][0].steps) == [0, 2]
    assert run.skipped == 1


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "7",
        '{"iteration": 3}',
        '{"iteration": "x", "layer": "a", "tensor": "b", "statistic": "c", "value": 1}',
        '{"iteration": 3, "layer": 5, "tensor": "b", "statistic": "c", "value": 1}',
        '{"iteration": 3, "layer": ["a"], "tensor": "b", "statistic": "c", "value": 1}',
        '{"iteration": 3, "layer": "a", "tensor": "b", "statistic": "c", "value": "many"}',
        "\x00\x00\x00",
        "[" * 100_000,
    ],
)
def test_lines_of_another_kind_are_skipped_and_counted(tmp_path: Path, line: str) -> None:
    run = read_run(write_records(tmp_path, [record(0, *KEY, 1.0)], tail=f"{line}\n"))
    assert (run.records, run.skipped, list(run.series)) == (1, 1, [KEY])


def test_lines_span_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LINES_AT_ONCE", 4)
    write_series(tmp_path, [float(i) for i in range(10)])
    file = tmp_path / "statistics_rank-0.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:5], "{broken\n", *lines[5:]]))
    run = read_run(tmp_path)
    assert list(run.series[KEY][0].values) == list(range(10))
    assert run.skipped == 1


def test_resumed_run_overwrites_its_steps(tmp_path: Path) -> None:
    rows = [(0, 1.0), (1, 2.0), (2, 3.0), (1, 20.0), (2, 30.0), (3, 40.0)]
    series = read_run(write_records(tmp_path, [record(i, *KEY, v) for i, v in rows])).series[KEY][0]
    assert list(series.steps) == [0, 1, 2, 3]
    assert list(series.values) == [1.0, 20.0, 30.0, 40.0]


def test_steps_that_a_resumed_run_has_not_reached_are_left_out(tmp_path: Path) -> None:
    rows = [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.nan), (1, 20.0), (2, 30.0)]
    series = read_run(write_records(tmp_path, [record(i, *KEY, v) for i, v in rows])).series[KEY][0]
    assert list(series.steps) == [0, 1, 2]
    assert list(series.values) == [1.0, 20.0, 30.0]


def test_a_resumed_run_leaves_out_later_steps_of_series_that_it_has_not_logged(
    tmp_path: Path,
) -> None:
    """Statistics of a step may be written after scalars of later steps."""
    rare, often = Key("fc1", "gradient", "max"), Key("fc1", "activation", "max")
    rows = [record(i, *key, 1.0) for i in range(96) for key in (rare, often)[i % 10 > 0 :]]
    rows += [{**record(i, "", "", "", 1.0), "name": "loss"} for i in (90, 95)]
    rows += [record(i, *often, 2.0) for i in range(82, 86)]
    rows.insert(-2, {**record(84, "", "", "", 2.0), "name": "loss"})
    series = read_run(write_records(tmp_path, rows)).series
    last = {key: (ranks[0].steps[-1], ranks[0].values[-1]) for key, ranks in series.items()}
    assert last == {rare: (80, 1.0), often: (85, 2.0), Key("loss", "", "value"): (84, 2.0)}


def test_a_resumed_run_that_begins_with_a_rare_series(tmp_path: Path) -> None:
    rare, often = Key("fc1", "gradient", "max"), Key("fc1", "activation", "max")
    rows = [record(i, *often, 1.0) for i in range(6)]
    rows[3:3] = [record(3, *rare, 1.0)]
    rows += [record(3, *key, 2.0) for key in (rare, often)]
    series = read_run(write_records(tmp_path, rows)).series
    assert {key: list(ranks[0].values) for key, ranks in series.items()} == {
        rare: [2.0],
        often: [1.0, 1.0, 1.0, 2.0],
    }


def test_a_resumed_run_leaves_scalars_in_other_units(tmp_path: Path) -> None:
    rows = [record(i, *KEY, 1.0) for i in (0, 1, 2, 1)]
    rows[3:3] = [{**record(1000 * i, "", "", "", 1.0), "name": "loss"} for i in range(3)]
    series = read_run(write_records(tmp_path, rows)).series
    assert list(series[KEY][0].steps) == [0, 1]
    assert list(series[Key("loss", "", "value")][0].steps) == [0, 1000, 2000]


@pytest.mark.parametrize("again", [[5, 5], [5, 1, 2]])
def test_scalars_that_are_logged_again_leave_others_alone(tmp_path: Path, again: list) -> None:
    rows = [{**record(i, "", "", "", 1.0), "name": "validation"} for i in again]
    rows[1:1] = [record(i, *KEY, 1.0) for i in range(8)]
    series = read_run(write_records(tmp_path, rows)).series
    assert list(series[KEY][0].steps) == list(range(8))
    assert list(series[Key("validation", "", "value")][0].steps) == again[1:]


def test_scalars_of_the_program_have_their_names(tmp_path: Path) -> None:
    rows = [{**record(0, "", "", "", v), "name": n} for n, v in (("loss", 9.0), ("lr", 0.5))]
    run = read_run(write_records(tmp_path, [*rows, record(0, *KEY, 1.0)]))
    values = {key: list(ranks[0].values) for key, ranks in run.series.items()}
    assert values == {Key("loss", "", "value"): [9.0], Key("lr", "", "value"): [0.5], KEY: [1.0]}
    assert run.layer_count == 1


def test_tensors_without_elements_alone(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="got 2 records of tensors without elements"):
        read_run(write_series(tmp_path, [None, None]))


def test_ranks(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        write_records(tmp_path, [record(0, *KEY, float(rank))], rank)
    run = read_run(tmp_path)
    assert run.ranks == [0, 2, 10]
    assert {rank: list(s.values) for rank, s in run.series[KEY].items()} == {
        0: [0.0],
        2: [2.0],
        10: [10.0],
    }
    assert read_run(tmp_path, rank=10).ranks == [10]
    with pytest.raises(LogError, match=r"expected statistics_rank-1.jsonl .* ranks \[0, 2, 10\]"):
        read_run(tmp_path, rank=1)


def test_plan_gives_precision_and_order(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, blocks=2, steps=range(1)))
    names = layer_names(2)
    assert run.layers == names
    assert run.plan[names[0], "activation", "fprop"] == "High precision"
    assert run.plan[names[0], "activation", "wgrad"] == "FP8 quantization"


@pytest.mark.parametrize("name", ["", "2026-11-29_10-00-00_"])
def test_a_gemm_that_also_ran_in_fp8_did_not_run_in_high_precision(tmp_path: Path, name) -> None:
    """The file name of the debug log may contain the start time."""
    write_series(tmp_path, [1.0])
    logs = tmp_path / "nvdlfw_inspect_logs"
    logs.mkdir()
    line = f"INFO - {KEY.layer}: Tensor: gradient, gemm {{}} - {{}}\n"
    fp8, high = "FP8 quantization", "High precision"
    plans = [("dgrad", fp8), ("dgrad", high), ("wgrad", high)]
    log = logs / f"nvdlfw_inspect_{name}globalrank-0.log"
    log.write_text("".join(line.format(*plan) for plan in plans))
    plan = read_run(tmp_path).plan
    assert plan[KEY.layer, "gradient", "dgrad"] == fp8
    assert plan[KEY.layer, "gradient", "wgrad"] == high


def test_missing_and_empty_directories(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="nothing, which is not there"):
        read_run(tmp_path / "nothing")
    with pytest.raises(LogError, match=r"holds statistics_rank-R.jsonl, .* no such file"):
        read_run(tmp_path)
    write_series(tmp_path, [1.0])
    with pytest.raises(LogError, match="which is a file"):
        read_run(tmp_path / "statistics_rank-0.jsonl")
    (tmp_path / "nvdlfw_inspect_logs").mkdir()
    with pytest.raises(LogError, match=f"{tmp_path} has it"):
        read_run(tmp_path / "nvdlfw_inspect_logs")


def test_run_that_logged_nothing(tmp_path: Path) -> None:
    (tmp_path / "statistics_rank-0.jsonl").touch()
    with pytest.raises(LogError, match="got empty files: nothing was logged"):
        read_run(tmp_path)


def test_file_without_records(tmp_path: Path) -> None:
    write_records(tmp_path, [], tail="{half")
    with pytest.raises(LogError, match=r"expected lines like .*, got none \(1 damaged\)"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("underflows%", Statistic("underflows%")),
        ("scale_inv_max", Statistic("scale_inv_max")),
        ("mse_columnwise", Statistic("mse", columnwise=True)),
        ("fp8_current_scaling_underflows%", Statistic("underflows%", "fp8_current_scaling")),
        ("mxfp8_scale_inv_min_columnwise", Statistic("scale_inv_min", "mxfp8", True)),
        (
            "max_blockwise_dynamic_range_block_size_32_dims_1_max_over_orientations",
            Statistic("max_blockwise_dynamic_range"),
        ),
        ("router_entropy", Statistic("router_entropy")),
    ],
)
def test_names_of_statistics(name: str, parsed: Statistic) -> None:
    assert Statistic.parse(name) == parsed


def test_common_prefix() -> None:
    assert common_prefix(["a.b.0.x", "a.b.1.x"]) == "a.b."
    assert common_prefix(["a.b"]) == "a."
    assert common_prefix(["fc1", "a.fc1"]) == ""


def test_ranks_that_log_the_same_stand_for_each_other(tmp_path: Path) -> None:
    """Ranks count as copies of a tensor only if all statistics of the tensor are equal."""
    layer, tensor, _ = KEY
    for rank, (first, second) in enumerate(((1.0, 2.0), (1.0, 3.0), (1.0, 2.0))):
        rows = [record(0, layer, tensor, "a", first), record(0, layer, tensor, "b", second)]
        write_records(tmp_path, [*rows, record(0, layer, "other", "a", math.nan)], rank)
    run = read_run(tmp_path)
    assert run.copies == {(layer, tensor): {0: [0, 2], 1: [1]}, (layer, "other"): {0: [0, 1, 2]}}
    for statistic in "ab":
        assert list(run.series[Key(layer, tensor, statistic)]) == [0, 1]
    assert run.ranks == [0, 1, 2]


def test_ranks_that_differ_in_one_of_several_block_sizes(tmp_path: Path) -> None:
    layer, tensor, _ = KEY
    names = [f"max_blockwise_dynamic_range_block_size_{size}_dims_1" for size in (16, 32)]
    for rank in (0, 1):
        values = zip(names, (1.0 + rank, 5.0), strict=True)
        write_records(tmp_path, [record(0, layer, tensor, *value) for value in values], rank)
    run = read_run(tmp_path)
    assert run.copies == {(layer, tensor): {0: [0], 1: [1]}}
    assert all(list(ranks) == [0, 1] for ranks in run.series.values())
