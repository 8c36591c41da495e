"""`python -m nvdlfw_inspect report`: one self-contained page about a run, or about two."""

from __future__ import annotations

import argparse
import base64
import gzip
import json
from pathlib import Path

from nvdlfw_inspect.report.advice import advise, combined_yaml, headline
from nvdlfw_inspect.report.charts import Columns, columns_for, payload
from nvdlfw_inspect.report.extras import require
from nvdlfw_inspect.report.records import LogError, read_run
from nvdlfw_inspect.report.table import Column, Table, extent, number, table_of, tally
from nvdlfw_inspect.report.templates import asset, render
from nvdlfw_inspect.report.verdicts import Verdicts, judge

EXAMPLES = """\
examples:
  python -m nvdlfw_inspect report log -o report.html
  python -m nvdlfw_inspect report log_fp8 log_bf16 -o compared.html    # two runs overlaid

The page is one file that needs no network: mail it, attach it to an issue, keep it with the run."""
LIMIT = 200  # rows of a table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("logdir", help="the log_dir of the run, with statistics_rank-R.jsonl")
    parser.add_argument("other", nargs="?", metavar="LOGDIR2", help="a run to compare it with")
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="the page (%(default)s)"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="read this rank only")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    logdirs = [arguments.logdir, *([arguments.other] if arguments.other else [])]
    page = report_html([judge(read_run(logdir, arguments.rank)) for logdir in logdirs])
    output = Path(arguments.output)
    try:
        output.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise LogError(
            f"[report] expected a file that can be written, got {output}: {error.strerror}"
        ) from error
    print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB")
    return 0


def report_html(verdicts: list[Verdicts]) -> str:
    """Returns the page about a run, or about a run and one to compare it with.

    Raises:
        MissingExtraError: plotly or jinja2 is not installed.
    """
    first = verdicts[0]
    columns = columns_for([v.run for v in verdicts])
    advice = advise(first)
    plotly: str = require("plotly.offline", "the report").get_plotlyjs()
    return render(
        "page.html.j2",
        headline=headline(first, advice),
        level=first.level,
        runs=[(str(v.run.path), tally(v), extent(v)) for v in verdicts],
        advice=advice,
        combined=combined_yaml(advice) if sum(bool(a.act_on) for a in advice) > 1 else None,
        table=table_of(first, LIMIT),
        compared=compare(*verdicts) if len(verdicts) == 2 else None,
        common=any(key in verdicts[-1].by_key for key in first.by_key),
        notes=_notes(verdicts, columns),
        style=asset("page.css"),
        script=asset("page.js"),
        plotly=packed(plotly),
        data=packed(json.dumps(payload(verdicts, columns), separators=(",", ":"))),
    )


def packed(text: str) -> str:
    """Compresses text by gzip, in base64; the browser decompresses it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def compare(first: Verdicts, second: Verdicts) -> Table:
    """Makes the table of series whose level differs between two runs, largest differences first."""
    both = [
        (row, second.by_key[row.key])
        for row in first.rows
        if row.key in second.by_key and second.by_key[row.key].level != row.level
    ]
    both.sort(key=lambda pair: -abs(pair[1].level - pair[0].level))
    columns = [
        Column("verdict"),
        Column("in the other"),
        *map(Column, ("layer", "tensor", "statistic")),
        Column("last", numeric=True),
        Column("in the other", numeric=True),
    ]
    rows = [
        [
            row.level.word,
            other.level.word,
            *row.key,
            number(row.last, row.key.statistic),
            number(other.last, row.key.statistic),
        ]
        for row, other in both[:LIMIT]
    ]
    return Table(columns, rows, [row.level for row, _ in both[:LIMIT]], len(both) - len(rows))


def _notes(verdicts: list[Verdicts], columns: Columns) -> list[str]:
    notes = []
    if columns.steps_each > 1:
        notes.append(
            f"The charts show {len(columns.of_step):,} recorded steps in {len(columns.first):,}"
            f" columns: each stands for up to {columns.steps_each:,} steps and shows the worst of"
            " them (the value of largest magnitude; of scale_inv_min the smallest), so no peak is"
            " lost. Verdicts and tables are made from every record."
        )
    if any(len(ranks) > 1 for v in verdicts for ranks in v.run.series.values()):
        notes.append("The charts show the worst of all ranks; --rank R shows one.")
    return notes
