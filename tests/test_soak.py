"""The figures of docs/reliability.md are those that soak tests have written."""

import importlib
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "tools/soak"


def test_the_page_shows_the_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SOAK))
    table = importlib.import_module("table")
    try:
        assert table.table() in table.PAGE.read_text(), "run python tools/soak/table.py"
        assert all(" 0 |" in line for line in table.table().splitlines()[2:]), "failures"
    finally:
        for name in ("table", "outcome"):
            sys.modules.pop(name, None)
