"""Where statistics go: files, loggers, TensorBoard."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_logs import messages, rows, statistics

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.logging import (
    BaseLogger,
    MetricLogger,
    enable_logging_at_current_step,
    get_logger,
    print_rank_0,
    wrap_tensorboard_writer,
)

Initialize = Callable[..., Any]
VALUES = {"min": -1 / 3, "max": math.inf, "mean": math.nan, "std": None}


class Memory(BaseLogger):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        self.seen.append((name, value, iteration))


class Batches(Memory):
    def log_batch(self, values: dict[str, float], iteration: int) -> None:
        self.seen.append((values, iteration))


class Writer:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.seen.append((name, value, iteration))


def test_files(initialize: Initialize, tmp_path: Path) -> None:
    manager = initialize()
    manager.log_statistics(2, "l.fc1", "activation", VALUES)
    debug_api.step()
    gap = " \t\t\t\t "
    assert statistics(tmp_path) == [
        f"INFO - l.fc1_activation_{name}{gap}iteration=000002{gap}value={value}"
        for name, value in [("min", "-0.3333"), ("max", "inf"), ("mean", "nan")]
    ]
    fields = {"iteration": 2, "layer": "l.fc1", "tensor": "activation", "rank": 0}
    assert rows(tmp_path) == [
        {**fields, "statistic": k, "name": f"l.fc1_activation_{k}", "value": v}
        for k, v in [("min", -1 / 3), ("max", "inf"), ("mean", "nan"), ("std", None)]
    ]


def test_timestamps_are_the_default(initialize: Initialize, tmp_path: Path) -> None:
    initialize(log_timestamps=True).log_statistics(0, "l", "weight", {"min": 1.0})
    debug_api.step()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - INFO - "
    for line in messages(tmp_path) + statistics(tmp_path):
        assert re.match(time, line)


def test_a_logger_instead_of_files(initialize: Initialize, tmp_path: Path) -> None:
    logger = Memory()
    initialize(statistics_logger=logger).log_statistics(2, "l", "weight", VALUES)
    debug_api.step()
    assert [name for name, _, _ in logger.seen] == ["l_weight_min", "l_weight_max", "l_weight_mean"]
    assert logger.seen[0] == ("l_weight_min", -1 / 3, 2)
    assert messages(tmp_path) == ["INFO - Using the provided logger for logging tensor statistics."]
    assert [path.name for path in tmp_path.iterdir()] == ["nvdlfw_inspect_logs"]


def test_a_logger_beside_files(initialize: Initialize, tmp_path: Path) -> None:
    logger = Memory()
    manager = initialize(statistics_logger=logger, default_logging_enabled=True)
    manager.log_statistics(2, "l", "weight", VALUES)
    debug_api.step()
    assert len(logger.seen) == len(statistics(tmp_path)) == 3
    assert messages(tmp_path) == [
        "INFO - Using the provided logger for logging tensor statistics.",
        f"INFO - Default logging to file enabled at {tmp_path}",
    ]


def test_tensorboard(initialize: Initialize, tmp_path: Path) -> None:
    writer = Writer()
    manager = initialize(tb_writer=writer)
    manager.log_statistics(2, "l", "weight", VALUES)
    assert writer.seen[0] == ("l_weight_min", -1 / 3, 2)
    debug_api.log_message("by hand")
    assert messages(tmp_path)[-2:] == [
        "INFO - TB Writer found. Logging to Tensorboard..",
        "INFO - by hand",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["nvdlfw_inspect_logs"]


def test_tensorboard_once_the_session_runs(initialize: Initialize) -> None:
    manager, writer = initialize(), Writer()
    MetricLogger.add_logger(wrap_tensorboard_writer(writer))
    manager.log_statistics(2, "l", "weight", {"min": 0.5})
    assert writer.seen == [("l_weight_min", 0.5, 2)]


def test_batches_where_a_logger_takes_them(initialize: Initialize) -> None:
    manager = initialize()
    logger = Batches()
    MetricLogger.add_logger(logger)
    manager.log_statistics(2, "l", "weight", {"min": 1.0, "max": 2.0, "std": None})
    assert logger.seen == [({"l_weight_min": 1.0, "l_weight_max": 2.0}, 2)]


def test_loggers_leave_with_the_session(initialize: Initialize) -> None:
    initialize()
    MetricLogger.add_logger(Memory())
    debug_api.end_debug()
    assert MetricLogger.enabled_loggers == []
    initialize()
    assert len(MetricLogger.enabled_loggers) == 1
    with pytest.raises(TypeError, match="BaseLogger"):
        MetricLogger.add_logger(object())


def test_an_error_of_one_logger_keeps_nothing_from_the_others(
    initialize: Initialize, tmp_path: Path
) -> None:
    class Offline(Memory):
        def log_scalar(self, name: str, value: float, iteration: int, **more: object) -> None:
            raise OSError("no connection")

    writer = Writer()
    options = {"statistics_logger": Offline(), "default_logging_enabled": True}
    manager = initialize(tb_writer=writer, **options)
    with pytest.raises(OSError, match="no connection"):
        manager.log_statistics(2, "l", "weight", VALUES)
    with pytest.raises(OSError, match="no connection"):
        MetricLogger.log_scalar("loss", 0.5, 2)
    debug_api.step()
    assert len(writer.seen) == len(statistics(tmp_path)) == 4


@pytest.mark.parametrize("log_dir", [".", ""])
def test_files_stay_where_they_began(
    initialize: Initialize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_dir: str
) -> None:
    """The files do not move if the program changes its working directory."""
    monkeypatch.chdir(tmp_path)
    manager = initialize(log_dir=log_dir)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert manager.log_dir == str(tmp_path)
    (tmp_path / "statistics_rank-0.jsonl").unlink()
    manager.log_statistics(0, "l", "weight", {"min": 1.0})
    with pytest.warns(UserWarning, match="was removed"):
        debug_api.step()
    assert [row["value"] for row in rows(tmp_path)] == [1.0]


def test_names_that_have_no_utf_8(initialize: Initialize, tmp_path: Path) -> None:
    log_dir = tmp_path / os.fsdecode(b"\xff")
    manager = initialize(log_dir=log_dir)
    manager.log_statistics(0, "l", "weight", {"min": 1.0})
    debug_api.log_message("\udcff", "l\udcff")
    debug_api.log_message(5)
    get_logger().log_message(6)
    debug_api.step()
    assert len(rows(log_dir)) == 1
    lines = [r"INFO - l\udcff: \udcff", "INFO - 5", "INFO - 6"]
    assert messages(log_dir) == [
        rf"INFO - Default logging to file enabled at {tmp_path}/\udcff",
        *lines,
    ]
    for name, kind in (("l\udcff", ValueError), (5, TypeError)):
        with pytest.raises(kind, match="whole characters as the name of a layer, got"):
            manager.route("ns", name, "look")


def test_the_point_is_that_of_c(tmp_path: Path) -> None:
    if not shutil.which("localedef"):
        pytest.skip("there is no localedef")
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"]
    if subprocess.run(made, capture_output=True, check=False).returncode:
        pytest.skip("there is no German locale")
    program = """if True:
        import locale, sys
        sys.modules["torch"] = None
        locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
        import nvdlfw_inspect.api as debug_api
        debug_api.initialize(log_dir=sys.argv[1])
        debug_api.DEBUG_MANAGER.log_statistics(0, "l", "weight", {"min": 1234.5})
    """
    command = [sys.executable, "-c", program, tmp_path]
    subprocess.run(command, env={**os.environ, "LOCPATH": str(tmp_path)}, check=True)
    assert statistics(tmp_path)[0].endswith("value=1234.5000")


def test_scalars_by_hand(initialize: Initialize, tmp_path: Path) -> None:
    initialize()
    MetricLogger.log_scalar("loss", 0.5, 3)
    get_logger().log_message("by hand")
    debug_api.flush()
    assert statistics(tmp_path)[0].endswith("value=0.5000")
    assert (rows(tmp_path)[0]["name"], rows(tmp_path)[0]["value"]) == ("loss", 0.5)
    assert messages(tmp_path)[-1] == "INFO - by hand"
    assert get_logger().root_log_dir == str(tmp_path)
    debug_api.end_debug()
    with pytest.raises(RuntimeError, match="initialize"):
        get_logger()


@pytest.mark.parametrize(("overwrite", "text", "json"), [(None, 1, 2), ("0", 2, 2), ("1", 1, 1)])
def test_files_of_an_earlier_session(
    initialize: Initialize,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overwrite: str | None,
    text: int,
    json: int,
) -> None:
    if overwrite is not None:
        monkeypatch.setenv("NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE", overwrite)
    for run in range(2):
        initialize().log_statistics(run, "l", "weight", {"min": 1.0})
        debug_api.end_debug()
    assert (len(statistics(tmp_path)), len(rows(tmp_path))) == (text, json)


def test_level_and_stamp(
    initialize: Initialize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVDLFW_INSPECT_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP", "1")
    monkeypatch.setenv("NVDLFW_INSPECT_LOG_TIMESTAMP", "20250131_051157")
    initialize()
    debug_api.log_message("quiet")
    debug_api.log_message("loud", level=30)
    name = "nvdlfw_inspect_logs/nvdlfw_inspect_20250131_051157_globalrank-0.log"
    assert (tmp_path / name).read_text() == "WARNING - loud\n"


def test_warnings_reach_the_terminal(
    initialize: Initialize, capsys: pytest.CaptureFixture[str]
) -> None:
    initialize()
    debug_api.log_message("loud", "fc1", level=30)
    assert capsys.readouterr().err == "NVDLFW INSPECT - WARNING - fc1: loud\n"


def test_print_rank_0(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    print_rank_0("a", 1)
    assert capsys.readouterr().out == "a 1 \n"
    monkeypatch.setenv("RANK", "1")
    print_rank_0("a")
    assert capsys.readouterr().out == ""


def test_schedules_by_hand() -> None:
    due = [i for i in range(12) if enable_logging_at_current_step(i, 2, 3, 8)]
    assert due == [4, 6, 8]
    assert enable_logging_at_current_step(1000, 10, 5, -1)
    listed = [[0, 1], [5, 6]]
    due = [i for i in range(9) if enable_logging_at_current_step(i, start_end_list=listed)]
    assert due == [0, 1, 5, 6]
    for wrong in ({"freq": 2.0}, {"start_step": 4.0}, {"end_step": "3"}):
        with pytest.raises(TypeError, match=f"expected {next(iter(wrong))} as an integer"):
            enable_logging_at_current_step(3, **wrong)
    with pytest.raises(ValueError, match="expected freq of 1 or more, got 0"):
        enable_logging_at_current_step(3, freq=0)


def test_show_reads_what_is_there(
    initialize: Initialize, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("rich")
    manager = initialize()
    manager.drain.append(lambda: manager.log_statistics(0, "l.fc1", "weight", {"min": 1.0}))
    debug_api.show()
    assert "l.fc1" in capsys.readouterr().out
    debug_api.end_debug()
    debug_api.show(tmp_path)
    assert "l.fc1" in capsys.readouterr().out
    debug_api.show()
    assert "no session is running, call initialize() first" in capsys.readouterr().out
    initialize(tb_writer=Writer())
    debug_api.show()
    assert "the session writes no statistics to files" in capsys.readouterr().out
