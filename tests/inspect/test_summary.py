"""The command line `summary`: its output, its exit codes, and bad input."""

import re
import shlex
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from synthetic_run import ill, record, write_records, write_run, write_series

from nvdlfw_inspect.__main__ import COMMANDS, main
from nvdlfw_inspect.report.extras import INSTALL
from nvdlfw_inspect.report.records import read_run
from nvdlfw_inspect.report.summary import print_summary
from nvdlfw_inspect.report.verdicts import judge

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

ESCAPE = "\x1b"


class NotInstalled:
    """An import finder that pretends one package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(name=name)


def summary(*arguments: object) -> int:
    return main(["summary", *map(str, arguments)])


def test_worst_layers_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, blocks=8, steps=range(140, 300, 2), ailment=ill)
    assert summary(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bad   NaN in model.layers.7.layernorm_mlp.fc2 since step 276"
    assert lines == [line.rstrip() for line in lines]
    rows = [line.split() for line in lines if re.match(r" *(bad|watch|ok) +model\.", line)]
    assert len(rows) == 20
    assert rows[0][:7] == [
        "bad",
        "model.layers.7.layernorm_mlp.fc2",
        "gradient",
        "cur_amax",
        "nan",
        "nan",
        "276",
    ]
    words = [row[0] for row in rows]
    assert words == sorted(words, key=["bad", "watch", "ok"].index)
    assert any("... and" in line for line in lines)


def test_row_has_last_extreme_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary(write_series(tmp_path, [1.0, -7.25, 2.0], statistic="mean"))
    assert "gradient   mean           2     -7.25      1" in capsys.readouterr().out


def test_limit_and_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary(write_run(tmp_path, blocks=1, steps=range(3)), "--limit", 2)
    out = capsys.readouterr().out
    assert len(re.findall(r"^ ok +model", out, re.M)) == 2
    assert "... and 70 more rows" in out
    assert ESCAPE not in out


def test_several_ranks_have_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 5):
        write_records(tmp_path, [record(0, "a", "weight", "underflows%", 4.0 * rank)], rank)
    summary(tmp_path)
    assert re.search(r"weight +underflows% +5 +20\.00 +20\.00", capsys.readouterr().out)
    summary(tmp_path, "--rank", 0)
    assert "rank " not in capsys.readouterr().out


def test_ranks_of_a_reduction_group_have_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two pipeline stages of two ranks each, and a weight with different values on every rank."""
    for rank in range(4):
        records = [record(0, "a", "gradient", "underflows%", 4.0 + rank // 2)]
        records.append(record(0, "a", "weight", "underflows%", float(rank)))
        write_records(tmp_path, records, rank)
    summary(tmp_path)
    out = capsys.readouterr().out
    assert re.search(r"gradient +underflows% +2-3 +5\.00", out)
    assert re.search(r"weight +underflows% +3 +3\.00", out)
    assert "2 watch, 0 ok" in out
    assert "4 ranks" in out


def test_damaged_lines_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary(write_records(tmp_path, [record(0, "a", "weight", "std", 1.0)], tail='{"iterat'))
    assert "1 damaged line skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("share", "fail_over", "code"),
    [
        (0.0, "watch", 0),
        (3.0, "watch", 1),
        (3.0, "bad", 0),
        (30.0, "watch", 1),
        (30.0, "bad", 1),
    ],
)
def test_exit_code(tmp_path: Path, share: float, fail_over: str, code: int) -> None:
    write_series(tmp_path, [share] * 3, statistic="underflows%")
    assert summary(tmp_path, "--fail-over", fail_over) == code


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(tmp_path, "--fail-over", "bad") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[report] expected a log directory that holds statistics_rank-R.jsonl")


def test_a_log_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "statistics_rank-0.jsonl").mkdir()
    assert summary(tmp_path, "--fail-over", "bad") == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_negative_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(write_series(tmp_path, [1.0]), "--limit", "-1") == 2
    assert "expected --limit of at least 0, got -1" in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    terminal = TextIOWrapper(BytesIO(), encoding="ascii", write_through=True)
    run = read_run(write_series(tmp_path, [1.0], layer="schön\ud800"))
    print_summary(judge(run), file=terminal)
    assert b"sch\\xf6n\\ud800" in terminal.buffer.getvalue()


@pytest.mark.parametrize("module", ["plotly", "jinja2"])
def test_missing_extra(
    tmp_path: Path,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_series(tmp_path, [1.0])
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(module), *sys.meta_path])
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err
    assert f"needs {module}, which is not installed: {INSTALL}" in err


def test_the_command_installs_the_extra() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    packages = shlex.split(INSTALL.partition(" install ")[2])
    assert packages == project["optional-dependencies"]["report"]


class Terminal(StringIO):
    """An output stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_summary_needs_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = judge(read_run(write_series(tmp_path, [20.0] * 3, statistic="underflows%")))
    monkeypatch.setattr(sys, "meta_path", [NotInstalled("rich"), *sys.meta_path])
    for name in [n for n in sys.modules if n.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    terminal, pipe = Terminal(), StringIO()
    print_summary(verdicts, file=terminal)
    print_summary(verdicts, file=pipe)
    assert terminal.getvalue() == pipe.getvalue()
    first, *_, header, rule, row, _, _ = pipe.getvalue().splitlines()
    assert first == "bad   Up to 20 % of the gradient becomes zero in model.0.fc1"
    assert header.split()[:4] == ["verdict", "layer", "tensor", "statistic"]
    assert set(rule) == {" ", "-"}
    assert row.split()[:3] == ["bad", "model.0.fc1", "gradient"]
    assert row.index("20.00") + 5 == header.index("last") + 4  # both end in one column


def test_a_terminal_gets_colours(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    terminal = Terminal()
    print_summary(judge(read_run(write_series(tmp_path, [1.0]))), file=terminal)
    assert ESCAPE in terminal.getvalue()


@pytest.mark.parametrize("columns", [60, 200])
def test_a_narrow_terminal_gets_paragraphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    layer = "model.layers.7.layernorm_mlp.fc2"
    terminal = Terminal()
    verdicts = judge(read_run(write_series(tmp_path, [1.0, None, float("nan")], layer=layer)))
    print_summary(verdicts, file=terminal)
    said = re.sub(f"{ESCAPE}[^m]*m", "", terminal.getvalue())
    assert (f"bad   {layer}\n      gradient cur_amax: last nan" in said) == (columns == 60)
    assert ("verdict" in said) == (columns == 200)


@pytest.mark.parametrize("command", [name for name, *_ in COMMANDS])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"python -m nvdlfw_inspect {command} " in capsys.readouterr().out


def test_no_command() -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


def test_logs_can_be_read_in_a_source_tree(tmp_path: Path) -> None:
    """Without the native module, only `check` fails, with an error of one line."""
    write_series(tmp_path, [1.0])
    code = (
        "import sys; sys.modules['nvdlfw_inspect._engine'] = None\n"
        "from nvdlfw_inspect.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    for command, exit_code in (("summary", 0), ("check", 2)):
        started = [sys.executable, "-c", code, command, str(tmp_path)]
        done = subprocess.run(started, capture_output=True, text=True, check=False)
        assert done.returncode == exit_code, done.stderr
    assert done.stderr.startswith("[nvdlfw_inspect] expected the extension module _engine in")
    assert done.stderr.count("\n") == 1


def test_one_of_each_is_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary(write_series(tmp_path, [1.0]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "0 bad, 0 watch, 1 ok: 1 series of 1 layer"
    assert lines[2] == "1 record of 1 step, number 0, 1 rank"


def test_module_runs_and_stays_light(tmp_path: Path) -> None:
    write_series(tmp_path, [20.0] * 3, statistic="overflows%")
    command = [sys.executable, "-m", "nvdlfw_inspect", "summary", str(tmp_path), "--fail-over=bad"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("bad   Up to 20 % of the gradient saturates in model.0.fc1")
    heavy = "{'torch', 'rich', 'plotly', 'jinja2'}"
    code = f"import sys, nvdlfw_inspect.report; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
