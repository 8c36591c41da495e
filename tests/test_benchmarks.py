"""The benchmark tools, as far as they go without a GPU: rows, files, the report."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import goals
import harness
import report


def test_report_prints_and_saves_rows(tmp_path, capsys):
    rows = harness.Report("cast", tmp_path)
    rows.row(op="cast", case="8x8", ratio=0.97, bar=0.95)
    assert "op=cast  case=8x8  ratio=0.97  bar=0.95" in capsys.readouterr().out
    document = json.loads(rows.save().read_text())
    assert document["rows"] == [{"op": "cast", "case": "8x8", "ratio": 0.97, "bar": 0.95}]
    assert document["torch"] == torch.__version__
    assert {"gpu", "cuda", "commit", "date"} <= document.keys()


def test_results_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TE_BENCH_RESULTS", str(tmp_path / "new"))
    assert harness.Report("cast").save() == tmp_path / "new" / "cast.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_message_is_clear():
    with pytest.raises(SystemExit, match="no CUDA device here"):
        harness.time_gpu(lambda: None)


def test_timings():
    timing = harness.Timing.of([float(i) for i in range(101)])
    assert (timing.min_us, timing.p10_us, timing.median_us, timing.p90_us) == (0, 10, 50, 90)
    called = []
    contenders = {name: lambda name=name: called.append(name) for name in "ab"}
    how = {"loops": 2, "calls": 3, "warmup": 1, "meet": lambda: called.append("|")}
    both = harness.time_host_each(contenders, **how)
    assert "".join(called) == "ab" + "|aaa|bbb" * 2, "in turns"
    assert both.keys() == contenders.keys() and both["a"].median_us > 0


@pytest.mark.gpu
def test_a_copy_runs_at_the_speed_of_memory():
    assert 1 < (1 << 30) / harness.copy_us(1 << 30) * 1e-6 < 20, "TB/s"
    x = torch.ones(1 << 20, device="cuda")
    assert harness.time_graph(lambda: x.mul_(1), repeats=5).median_us > 0


ROWS = [
    {"op": "cast", "case": "large", "us": 12.345678, "copy_us": 12.0, "ratio": 0.972, "bar": 0.95},
    {"op": "cast", "case": "small", "ratio": 0.5, "bar": 0.95},
    {"op": "cast", "case": "free", "ratio": 0.1},
    {"op": "cast + transpose", "case": "a|b", "ratio": 0.9, "bar": 1.0, "better": "lower"},
]


def documents():
    where = {"gpu": "H", "torch": "2", "cuda": "13", "commit": "c0ffee", "date": "2000-01-01T00:00"}
    return {"quantize": {**where, "rows": ROWS}}


def test_summary_judges_rows_with_a_bar():
    text = report.render(documents(), has_chart=False)
    assert "| cast | >= 0.95 of copy | 0.50 - 0.97, 1 of 2 met | TE 0.91 |" in text
    assert "| cast + transpose | >= 0.88 of copy | 0.90, met |" in text
    assert "| RMSNorm backward | >= 0.87 of copy | not measured | TE 0.87 |" in text


def test_details_show_every_row():
    text = report.render(documents(), has_chart=False)
    assert "H, torch 2, CUDA 13, commit c0ffee, 2000-01-01." in text
    assert "| cast | large | 12.35 | 0.972 | >= 0.95 met |" in text
    assert "| cast | small |  | 0.5 | >= 0.95 **missed** |" in text
    assert "| cast | free |  | 0.1 |  |" in text
    assert r"| cast + transpose | a\|b |  | 0.9 | <= 1.00 met |" in text


def test_chart_is_the_same_file_for_the_same_results(tmp_path):
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    assert report.draw(documents(), first)
    assert report.draw(documents(), second)
    assert first.read_bytes() == second.read_bytes()
    assert not report.draw({}, first)


def test_goals_are_distinct():
    assert len({goal.work for goal in goals.GOALS}) == len(goals.GOALS)
