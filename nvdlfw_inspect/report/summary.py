"""`python -m nvdlfw_inspect summary`: the worst layers, in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import IO

from nvdlfw_inspect.report.advice import advise, headline
from nvdlfw_inspect.report.extras import MissingExtraError, require
from nvdlfw_inspect.report.records import LogError, read_run
from nvdlfw_inspect.report.rules import Level
from nvdlfw_inspect.report.table import Table, extent, table_of, tally
from nvdlfw_inspect.report.verdicts import Verdicts, judge

EXAMPLES = """\
examples:
  python -m nvdlfw_inspect summary log
  python -m nvdlfw_inspect summary log --limit 50 --rank 3
  python -m nvdlfw_inspect summary log --fail-over bad    # in CI: exit code 1 if anything is bad

exit codes: 0 all well, 1 a verdict reached --fail-over, 2 there is nothing to read"""
LIMIT = 20
WHY = 20  # characters that the last column of the table needs to be readable
STYLES = {Level.OK: "green", Level.WATCH: "yellow", Level.BAD: "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("logdir", help="the log_dir of the run, with statistics_rank-R.jsonl")
    parser.add_argument(
        "--fail-over",
        choices=[Level.WATCH.word, Level.BAD.word],
        help="exit with 1 if a verdict is this or worse",
    )
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="N", help="rows (%(default)s)")
    parser.add_argument("--rank", type=int, metavar="R", help="read this rank only")


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary and returns the exit code."""
    if arguments.limit < 0:
        raise LogError(f"[summary] expected --limit of at least 0, got {arguments.limit}")
    verdicts = judge(read_run(arguments.logdir, arguments.rank))
    print_summary(verdicts, arguments.limit)
    if arguments.fail_over is None:
        return 0
    return int(verdicts.level >= Level[arguments.fail_over.upper()])


def print_summary(
    verdicts: Verdicts, limit: int | None = LIMIT, file: IO[str] | None = None
) -> None:
    """Prints the summary of a run, in colours if rich is installed and stdout is a terminal."""
    out = _output(file or sys.stdout)
    advice = advise(verdicts)
    if not advice:
        out.line(headline(verdicts, advice), style=STYLES[verdicts.level])
    for piece in advice:
        out.line(piece.title, first=f"{piece.level.word:6}", style=STYLES[piece.level])
    out.line(f"{tally(verdicts)}\n{extent(verdicts)}", style="dim")
    table = table_of(verdicts, limit)
    out.table(table)
    if table.left_out:
        out.line(f"... and {table.left_out:,} more rows", style="dim")
    if advice:
        how = f"python -m nvdlfw_inspect report {verdicts.run.path} -o report.html"
        out.line(f"Charts, and the YAML that acts on this: {how}", style="dim")


def _output(file: IO[str]) -> _Plain | _Rich:
    if file.isatty():
        try:
            return _Rich(file)
        except MissingExtraError:
            pass
    return _Plain(file)


class _Plain:
    """Writes text without colours; lines are not wrapped."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def line(self, text: str, first: str = "", style: str = "") -> None:
        """Writes a line; the style is for terminals."""
        self._print(first + text)

    def table(self, table: Table) -> None:
        """Writes a table; columns of numbers are aligned to the right."""
        lines = [[column.title for column in table.columns], *table.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        self._print("")
        for cells in lines:
            sides = zip(cells, widths, table.columns, strict=True)
            padded = (
                cell.rjust(width) if column.numeric else cell.ljust(width)
                for cell, width, column in sides
            )
            self._print(f" {'   '.join(padded)}".rstrip())
        self._print("")

    def _print(self, text: str) -> None:
        """Prints a line; characters that the encoding of the file lacks are escaped."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._file)


class _Rich:
    """Writes text in colours, and paragraphs if the terminal is too narrow for a table.

    Raises:
        MissingExtraError: rich is not installed.
    """

    def __init__(self, file: IO[str]) -> None:
        self._console = require("rich.console", "the summary").Console(file=file, highlight=False)
        self._text = require("rich.text", "the summary").Text
        self._padding = require("rich.padding", "the summary").Padding

    def line(self, text: str, first: str = "", style: str = "") -> None:
        """Writes a line; the style is that of `first`, or of the whole line if `first` is empty."""
        parts = [(first, style), text] if first else [(text, style)]
        self._console.print(self._text.assemble(*parts))

    def table(self, table: Table) -> None:
        """Writes a table, its first column in the colour of the row."""
        *others, _ = zip([c.title for c in table.columns], *table.rows, strict=True)
        if sum(max(map(len, cells)) + 3 for cells in others) + WHY > self._console.width:
            self._paragraphs(table)
            return
        rich_table = require("rich.table", "the summary")
        box = require("rich.box", "the summary").SIMPLE_HEAD
        drawn = rich_table.Table(box=box, pad_edge=False)
        for column in table.columns:
            drawn.add_column(
                column.title,
                justify="right" if column.numeric else "left",
                no_wrap=column.title != "why",
                overflow="fold",
            )
        for cells, level in zip(table.rows, table.levels, strict=True):
            first = self._text(cells[0], style=STYLES[level])
            drawn.add_row(first, *map(self._text, cells[1:]))
        self._console.print(drawn)

    def _paragraphs(self, table: Table) -> None:
        """Writes the rows as paragraphs: columns would be wrapped after a few letters."""
        self._console.print()
        for cells, level in zip(table.rows, table.levels, strict=True):
            verdict, layer, tensor, statistic, *numbers, why = cells
            titles = [column.title for column in table.columns if column.numeric]
            values = ", ".join(f"{t} {n}" for t, n in zip(titles, numbers, strict=True))
            self.line(layer, first=f"{verdict:6}", style=STYLES[level])
            below = filter(None, (f"{tensor} {statistic}: {values}", why))
            self._console.print(self._padding(self._text("\n".join(below)), (0, 0, 0, 6)))
        self._console.print()
