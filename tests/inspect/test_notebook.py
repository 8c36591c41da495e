"""`show`: text where HTML cannot be displayed, HTML in a notebook."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from synthetic_run import write_series

from nvdlfw_inspect.report import show

pytest.importorskip("rich")
pytest.importorskip("jinja2")


def test_prints_outside_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(write_series(tmp_path, [20.0] * 3, statistic="underflows%"))
    assert capsys.readouterr().out.startswith("bad   Up to 20 % of the gradient becomes zero")


def test_displays_html_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.HTML, display.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    show(write_series(tmp_path, [20.0] * 3, statistic="underflows%", layer="a<b>"))
    (html,) = shown
    assert "becomes zero in a&lt;b&gt;" in html
    assert "DisableFP8GEMM" in html
    assert html.count("<tr>") == 2
    assert capsys.readouterr().out == ""


def test_terminal_ipython_is_no_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ipython = ModuleType("IPython")
    ipython.get_ipython = SimpleNamespace
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    show(write_series(tmp_path, [1.0]))
    assert "Nothing stands out" in capsys.readouterr().out
