"""The HTML page of a report: it is self-contained; tests check its text and its chart data."""

import base64
import gzip
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_run import ill, record, write_records, write_run, write_series

from nvdlfw_inspect.__main__ import main
from nvdlfw_inspect.report import charts
from nvdlfw_inspect.report.charts import columns_for, payload
from nvdlfw_inspect.report.page import compare, report_html
from nvdlfw_inspect.report.records import read_run
from nvdlfw_inspect.report.verdicts import judge

pytest.importorskip("jinja2")
pytest.importorskip("plotly")


def page_of(*logdirs: Path) -> str:
    return report_html([judge(read_run(logdir)) for logdir in logdirs])


def data_of(page: str, name: str = "data") -> str:
    text = re.search(rf'<script type="text/plain" id="{name}">(.*?)</script>', page, re.S)
    return gzip.decompress(base64.b64decode(text[1])).decode()


def payload_of(*logdirs: Path) -> dict:
    verdicts = [judge(read_run(logdir)) for logdir in logdirs]
    return payload(verdicts, columns_for([v.run for v in verdicts]))


class Tags(HTMLParser):
    """Collects tags with their attributes, and checks that they nest."""

    VOID = ("meta", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_self_contained(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, blocks=8, steps=range(280, 300), ailment=ill))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    for tag, attributes in tags.found:
        assert tag not in {"link", "img", "iframe"}
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {a["href"][1:] for t, a in tags.found if t == "a"} <= set(ids)
    assert "default-src 'none'" in page  # so browsers refuse to load anything
    assert "plotly.js v" in data_of(page, "plotly")[:200]


def test_page_says_what_is_wrong_first(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, blocks=8, steps=range(140, 300, 2), ailment=ill))
    title = "NaN in model.layers.7.layernorm_mlp.fc2 since step 276"
    assert f"<title>{title}</title>" in page
    body = page[page.index("<main") :]
    assert body.index(title) < body.index("DisableFP8Layer") < body.index('id="heat"')
    assert body.count('class="copy"') == 6 + 1  # one per advice, and one for the combined config


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    page = page_of(write_series(tmp_path, [20.0] * 3, layer=name, statistic="underflows%"))
    assert name not in page
    assert json.loads(data_of(page))["layers"] == [name]


def test_values_of_the_charts(tmp_path: Path) -> None:
    values = [1.0, math.nan, -math.inf, 0.123456, None]
    panel = payload_of(write_series(tmp_path, values, layer="m.1.fc1"))
    assert panel["panels"][0]["rows"] == [[[1.0, "nan", "-inf", 0.1235]]]
    assert (panel["first"], panel["short"]) == ([0, 1, 2, 3], ["fc1"])
    assert panel["panels"][0]["levels"] == [2]


def test_worst_layers_of_a_panel_rank_as_in_the_table(tmp_path: Path) -> None:
    """A layer that is bad at every step comes before one with a larger peak that has passed."""
    shares = {"peak": [60.0, *[0.0] * 9], "lasting": [12.0] * 10, "fine": [0.0] * 10}
    shares["worse"] = [14.0] * 10
    records = [
        record(step, layer, "weight", "underflows%", share)
        for layer, values in shares.items()
        for step, share in enumerate(values)
    ]
    logdir = write_records(tmp_path, records)
    data = payload_of(logdir)
    ranked = [data["layers"][i] for i in data["panels"][0]["worst"]]
    assert ranked == ["worse", "lasting", "peak"]
    rows = [row for row in judge(read_run(logdir)).rows if row.level]
    assert [row.key.layer for row in rows] == ranked


def test_values_that_differ_little_stay_apart(tmp_path: Path) -> None:
    values = [4.17715597, 4.17759132, 4.17806053]
    data = payload_of(write_series(tmp_path, values))
    assert data["panels"][0]["rows"][0][0] == [4.177156, 4.177591, 4.178061]


def test_long_runs_are_downsampled_without_losing_a_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "MOST_COLUMNS", 10)
    values = [0.5] * 95
    values[37], values[61] = 99.0, -200.0
    data = payload_of(write_series(tmp_path, values, statistic="mean"))
    assert (data["first"][0], data["last"][-1], len(data["first"])) == (0, 94, 10)
    assert all(a + 1 == b for a, b in zip(data["last"], data["first"][1:], strict=False))
    row = data["panels"][0]["rows"][0][0]
    assert [v for v in row if v != 0.5] == [99.0, -200.0]
    assert data["first"][row.index(99.0)] <= 37 <= data["last"][row.index(99.0)]
    assert "95 recorded steps in 10 columns: each stands for up to 10 steps" in page_of(tmp_path)


def test_smallest_scale_is_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "MOST_COLUMNS", 1)
    data = payload_of(write_series(tmp_path, [3.0, 0.5, 2.0], statistic="scale_inv_min"))
    assert data["panels"][0]["rows"][0][0] == [0.5]


def test_charts_show_the_worst_rank(tmp_path: Path) -> None:
    for rank, values in enumerate(([1.0, 2.0, 3.0], [4.0, 1.0, math.inf])):
        records = [record(i, "a", "weight", "std", v) for i, v in enumerate(values)]
        write_records(tmp_path, records, rank)
    assert payload_of(tmp_path)["panels"][0]["rows"][0][0] == [4.0, 2.0, "inf"]
    assert "worst of all ranks" in page_of(tmp_path)


def test_two_runs_share_columns_and_layers(tmp_path: Path) -> None:
    first = write_series(tmp_path / "a", [20.0, 20.0], statistic="underflows%")
    records = [record(i, layer, "gradient", "underflows%", 1.0) for i in (1, 2) for layer in "xy"]
    records += [record(1, "model.0.fc1", "gradient", "underflows%", 0.5)]
    second = write_records(tmp_path / "b", records)
    data = payload_of(first, second)
    assert data["first"] == [0, 1, 2]
    assert data["layers"] == ["model.0.fc1", "x", "y"]
    a, b = data["panels"][0]["rows"]
    assert a == [[20.0, 20.0, None], None, None]
    assert b == [[None, 0.5, None], [None, 1.0, 1.0], [None, 1.0, 1.0]]
    page = page_of(first, second)
    assert "Where the two runs differ" in page
    assert 'id="which"' in page
    assert 'id="which"' not in page_of(first)


def test_runs_without_a_common_series_are_not_called_alike(tmp_path: Path) -> None:
    first = write_series(tmp_path / "a", [1.0], layer="x")
    other = write_series(tmp_path / "b", [1.0], layer="y")
    assert "Nothing can be compared" in page_of(first, other)
    assert "has the same verdict in both" in page_of(first, first)


def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_series(tmp_path, [1.0])
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(output)]) == 0
    assert capsys.readouterr().out.startswith(str(output))
    assert output.read_text().startswith("<!doctype html>")


def test_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_series(tmp_path, [1.0])
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert "expected a file that can be written" in capsys.readouterr().err


def test_the_largest_differences_of_two_runs_come_first(tmp_path: Path) -> None:
    shares = ({"a": 3.0, "b": 0.0}, {"a": 0.0, "b": 20.0})
    runs = []
    for number, layers in enumerate(shares):
        rows = [record(0, n, "gradient", "underflows%", v) for n, v in layers.items()]
        runs.append(judge(read_run(write_records(tmp_path / str(number), rows))))
    for both in (runs, runs[::-1]):
        assert [row[2] for row in compare(*both).rows] == ["b", "a"]
