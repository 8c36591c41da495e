"""The check of retired names finds them, and leaves plain English alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import check_words


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1  # from a tape", "'tape' is retired: recording"),
        ("a.md", "A `Demand` of the next stage", "'Demand' is retired: OperandRequest, request"),
        ("a.py", "def f(given): ...", "'given' is no name here: explicit_"),
        ("a.cpp", "auto* kept = new Table;", "'kept' is no name here: saved, cached"),
    ],
)
def test_retired(name, text, message):
    ((line, found),) = check_words.check(Path(name), f"\n{text}\n")
    assert line == 2 and found.startswith(message)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Rows that are kept where none is given; stereotaped, whole layers."""'),
        ("a.py", "from hypothesis import given"),
        ("a.cpp", 'f(x, "expected a value, none was given");  // kept for later'),
        ("a.md", "Memory is kept on demand."),
    ],
)
def test_plain_english(name, text):
    assert not list(check_words.check(Path(name), text))


def test_fails_on_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.md").write_text("The whole_layer.\n")
    run = type("Listed", (), {"stdout": "a.md\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_words.subprocess, "run", lambda *_, **__: run)
    assert check_words.main() == 1
    assert "a.md:1: 'whole_layer' is retired: fused layer" in capsys.readouterr().out
