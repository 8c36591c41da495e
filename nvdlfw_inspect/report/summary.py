"""`python -m nvdlfw_inspect summary`: the worst layers, in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import IO

from nvdlfw_inspect.report.advice import advise, headline
from nvdlfw_inspect.report.extras import require
from nvdlfw_inspect.report.records import read_run
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
STYLES = {Level.OK: "green", Level.WATCH: "yellow", Level.BAD: "bold red"}
PLAIN_WIDTH = 1000  # where nobody looks, nothing is folded


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
    verdicts = judge(read_run(arguments.logdir, arguments.rank))
    print_summary(verdicts, arguments.limit)
    if arguments.fail_over is None:
        return 0
    return int(verdicts.level >= Level[arguments.fail_over.upper()])


def print_summary(
    verdicts: Verdicts, limit: int | None = LIMIT, file: IO[str] | None = None
) -> None:
    """Prints what is wrong with a run: in colours on a terminal, plain elsewhere.

    Raises:
        MissingExtraError: rich is not installed.
    """
    console = require("rich.console", "the summary").Console(
        file=file or sys.stdout, highlight=False
    )
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    text = require("rich.text", "the summary").Text
    advice = advise(verdicts)
    if not advice:
        console.print(text(headline(verdicts, advice), style=STYLES[verdicts.level]))
    for piece in advice:
        console.print(text.assemble((f"{piece.level.word:6}", STYLES[piece.level]), piece.title))
    console.print(text(f"{tally(verdicts)}\n{extent(verdicts)}", style="dim"))
    table = table_of(verdicts, limit)
    with console.capture() as drawn:
        console.print(_drawn(table))
    console.file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))
    if table.left_out:
        console.print(text(f"... and {table.left_out:,} more rows", style="dim"))
    if advice:
        how = f"python -m nvdlfw_inspect report {verdicts.run.path} -o report.html"
        console.print(text(f"Charts, and the YAML that acts on this: {how}", style="dim"))


def _drawn(table: Table) -> object:
    rich_table, text = require("rich.table", "the summary"), require("rich.text", "the summary")
    drawn = rich_table.Table(box=require("rich.box", "the summary").SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        drawn.add_column(
            column.title,
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric or column.title == "verdict",
            overflow="fold",
        )
    for cells, level in zip(table.rows, table.levels, strict=True):
        drawn.add_row(text.Text(cells[0], style=STYLES[level]), *map(text.Text, cells[1:]))
    return drawn
