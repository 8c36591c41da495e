"""Each rule on a series that it flags, on one that it accepts, and near its thresholds."""

import math
from pathlib import Path

import pytest
from synthetic_run import record, write_records, write_run, write_series

from nvdlfw_inspect.report.records import Key, read_run
from nvdlfw_inspect.report.rules import RULES, Level
from nvdlfw_inspect.report.verdicts import Row, Verdicts, judge

OK, WATCH, BAD = Level.OK, Level.WATCH, Level.BAD
LAYER = "model.0.fc1"


def judged(tmp_path: Path, statistic: str, values: list, tensor: str = "gradient") -> Row:
    write_series(tmp_path, values, statistic=statistic, tensor=tensor)
    (row,) = judge(read_run(tmp_path)).rows
    return row


def judged_together(tmp_path: Path, series: dict[tuple[str, str, str], list[float]]) -> Verdicts:
    records = [record(i, *key, v) for key, values in series.items() for i, v in enumerate(values)]
    return judge(read_run(write_records(tmp_path, records)))


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ([0.5] * 40, OK),
        ([1.5] * 40, WATCH),
        ([6.0] * 40, BAD),
        ([0.1] * 39 + [6.0], BAD),  # at the last step
        ([6.0] + [0.1] * 39, WATCH),  # one step: delayed scaling has no history at the first step
        ([6.0] * 3 + [0.1] * 37, BAD),  # more than 5 % of the steps
        ([1.5] + [0.1] * 39, OK),
        ([5.0] * 40, WATCH),  # not above the threshold
    ],
)
def test_overflow(tmp_path: Path, values: list[float], level: Level) -> None:
    row = judged(tmp_path, "overflows%", values)
    assert row.level is level
    assert row.reason.startswith("overflow") == (level > OK)


@pytest.mark.parametrize("at", range(4))
def test_nan_hides_no_overflow(tmp_path: Path, at: int) -> None:
    values = [50.0, 50.0, 50.0]
    values.insert(at, math.nan)
    series = {(LAYER, "gradient", "overflows%"): values}
    found = judged_together(tmp_path, series).findings
    assert [(f.rule.name, f.level) for f in found] == [("non-finite", BAD), ("overflow", BAD)]
    assert found[1].value == 50.0


@pytest.mark.parametrize(("share", "level"), [(1.9, OK), (2.1, WATCH), (9.9, WATCH), (10.1, BAD)])
@pytest.mark.parametrize("name", ["underflows%", "underflows%_columnwise"])
def test_underflow(tmp_path: Path, name: str, share: float, level: Level) -> None:
    assert judged(tmp_path, name, [share] * 3).level is level


def test_results_of_gemms_are_not_fp8(tmp_path: Path) -> None:
    assert judged(tmp_path, "underflows%", [50.0] * 3, tensor="output").level is OK


def test_layers_in_high_precision_lose_nothing(tmp_path: Path) -> None:
    messages = tmp_path / "nvdlfw_inspect_logs"
    messages.mkdir()
    plan = messages / "nvdlfw_inspect_globalrank-0.log"
    line = "INFO - {}: Tensor: gradient, gemm {} - High precision\n"
    plan.write_text(line.format(LAYER, "dgrad"))
    assert judged(tmp_path, "underflows%", [50.0]).level is BAD  # wgrad still reads it
    plan.write_text(line.format(LAYER, "dgrad") + line.format(LAYER, "wgrad"))
    assert judged(tmp_path, "underflows%", [50.0]).level is OK


def test_recipe_that_did_not_run_is_not_judged(tmp_path: Path) -> None:
    real = (LAYER, "weight", "underflows%")
    what_if = (LAYER, "weight", "mxfp8_underflows%")
    assert judged_together(tmp_path, {real: [0.1] * 3, what_if: [30.0] * 3}).level is OK
    assert judged_together(tmp_path, {what_if: [30.0] * 3}).level is BAD  # it did run


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("statistic", ["mean", "cur_amax", "of_a_user"])
def test_not_finite(tmp_path: Path, statistic: str, value: float) -> None:
    row = judged(tmp_path, statistic, [1.0, value, 1.0])
    assert (row.level, row.step) == (BAD, 1)
    assert row.reason == "non-finite: at 1 of 3 steps, gone at the last"


def test_large_values_are_finite_though_their_sum_is_not(tmp_path: Path) -> None:
    assert judged(tmp_path, "l2_norm", [1e308] * 4).level is OK


def test_first_layer_that_was_not_finite_comes_first(tmp_path: Path) -> None:
    def ailment(layer: str, tensor: str, statistic: str, step: int, value: float) -> float:
        block = int(layer.split(".")[2])
        backward = tensor == "gradient" and step >= 5  # starts in the last layer
        forward = tensor == "activation" and block >= 1 and step >= 6  # one step later
        return math.nan if statistic == "std" and (backward or forward) else value

    run = read_run(write_run(tmp_path, blocks=2, steps=range(8), ailment=ailment))
    order = [(row.key.layer, row.key.tensor) for row in judge(run).rows if row.level is BAD]
    assert order[:8] == [(layer, "gradient") for layer in reversed(run.layers)]
    assert order[8:] == [(layer, "activation") for layer in run.layers[4:]]


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ([1.0, 4.0, 12.0], OK),
        ([1.0, 4.0, 17.0], WATCH),
        ([1.0] * 5 + [2.0**k for k in range(1, 8)], BAD),
        ([2.0 ** (i / 10) for i in range(200)], OK),  # growth to 2^20, but slow
        ([100.0, 10.0, 1.0], OK),  # falling
        ([0.0, 0.0, 100.0], OK),  # no factor from zero
    ],
)
def test_growth(tmp_path: Path, values: list[float], level: Level) -> None:
    assert judged(tmp_path, "cur_amax", values).level is level


def test_growth_between_records_far_apart(tmp_path: Path) -> None:
    records = [record(i, LAYER, "gradient", "cur_amax", v) for i, v in ((0, 1.0), (100, 200.0))]
    (row,) = judge(read_run(write_records(tmp_path, records))).rows
    assert row.reason == "growth: x 200 within 100 steps, to 200"


@pytest.mark.parametrize(
    ("tensor", "bits", "level"),
    [
        ("activation", 17.5, OK),
        ("activation", 18.0, WATCH),  # E4M3: 17.8
        ("gradient", 31.5, OK),
        ("gradient", 32.0, WATCH),  # E5M2: 31.8
        ("wgrad", 40.0, OK),  # not rounded to FP8
    ],
)
def test_range(tmp_path: Path, tensor: str, bits: float, level: Level) -> None:
    assert judged(tmp_path, "dynamic_range", [bits] * 3, tensor).level is level


def test_range_is_left_to_underflows_where_those_were_logged(tmp_path: Path) -> None:
    wide = (LAYER, "weight", "dynamic_range")
    lost = (LAYER, "weight", "underflows%")
    assert judged_together(tmp_path, {wide: [30.0], lost: [0.01]}).level is OK


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ([1.0] * 5, OK),
        ([0.0] * 5, BAD),
        ([1.0, 1.0, 0.0, 0.0, 0.0], BAD),
        ([0.0, 0.0, 1.0, 1.0], OK),  # initialised with zeros
        ([1.0, 0.0, 1.0], WATCH),
        ([0.0], BAD),
    ],
)
@pytest.mark.parametrize("statistic", ["cur_amax", "l2_norm"])
def test_dead(tmp_path: Path, statistic: str, values: list[float], level: Level) -> None:
    assert judged(tmp_path, statistic, values).level is level


def test_dynamic_range_of_zeros(tmp_path: Path) -> None:
    row = judged(tmp_path, "dynamic_range", [math.nan] * 3)
    assert row.reason == "dead: all zero from the first step on"
    amax, wide = (LAYER, "weight", "cur_amax"), (LAYER, "weight", "dynamic_range")
    found = judged_together(tmp_path, {amax: [1.0] * 3, wide: [math.nan] * 3})
    assert found.level is OK  # the amax shows that the tensor is not zero


@pytest.mark.parametrize(("decibel", "level"), [(25, OK), (15, WATCH), (5, BAD)])
def test_noise(tmp_path: Path, decibel: int, level: Level) -> None:
    mse, std = (LAYER, "weight", "mse"), (LAYER, "weight", "std")
    series = {mse: [4.0 / 10 ** (decibel / 10)] * 3, std: [2.0] * 3}
    assert judged_together(tmp_path, series).level is level


def test_noise_counts_the_mean_as_signal(tmp_path: Path) -> None:
    series = {"mse": [1.0], "std": [1.0], "mean": [20.0]}
    found = judged_together(tmp_path, {(LAYER, "weight", s): v for s, v in series.items()})
    assert found.by_key[Key(LAYER, "weight", "mse")].level is OK  # 26 dB


def test_noise_of_column_wise_values(tmp_path: Path) -> None:
    """There are no column-wise statistics of the signal, so `std` is used."""
    series = {"std": [1.0] * 3, "mse_columnwise": [1.0] * 3}
    judged = judged_together(tmp_path, {(LAYER, "weight", s): v for s, v in series.items()})
    assert judged.by_key[Key(LAYER, "weight", "mse_columnwise")].level is BAD


def test_noise_beside_a_signal_whose_power_is_no_float(tmp_path: Path) -> None:
    series = {"std": [1e200] * 3, "mse": [1.0] * 3}
    assert (
        judged_together(tmp_path, {(LAYER, "weight", s): v for s, v in series.items()}).level is OK
    )


def test_the_least_of_the_smallest_scales_is_the_worst(tmp_path: Path) -> None:
    for rank, value in enumerate((1e-3, 1e-6, 5.0)):
        write_records(tmp_path, [record(0, LAYER, "weight", "scale_inv_min", value)], rank)
    (row,) = judge(read_run(tmp_path)).rows
    assert (row.extreme, row.rank) == (1e-6, 1)


@pytest.mark.parametrize("zeros", [0, 1])
def test_the_row_is_that_of_the_rank_with_a_nan(tmp_path: Path, zeros: int) -> None:
    """A tensor of zeros has a dynamic range of NaN, which is no finding if values follow."""
    for rank in (0, 1):
        values = [math.nan if rank == zeros else 5.0, 5.0]
        rows = [record(i, LAYER, "weight", "dynamic_range", v) for i, v in enumerate(values)]
        write_records(tmp_path, rows, rank)
    (row,) = judge(read_run(tmp_path)).rows
    assert (row.rank, row.level, math.isnan(row.extreme)) == (zeros, OK, True)


def test_worst_rank_decides(tmp_path: Path) -> None:
    for rank, share in ((0, 0.1), (1, 20.0), (2, 3.0)):
        records = [record(i, LAYER, "weight", "underflows%", share) for i in range(3)]
        write_records(tmp_path, records, rank)
    (row,) = judge(read_run(tmp_path)).rows
    assert (row.rank, row.level, row.last) == (1, BAD, 20.0)


def test_healthy_run(tmp_path: Path) -> None:
    verdicts = judge(read_run(write_run(tmp_path)))
    assert verdicts.level is OK
    assert not verdicts.findings


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
