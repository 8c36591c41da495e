"""Shows the summary of a run: as HTML in a notebook, as text elsewhere."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nvdlfw_inspect.report.advice import advise, headline
from nvdlfw_inspect.report.extras import MissingExtraError, require
from nvdlfw_inspect.report.records import read_run
from nvdlfw_inspect.report.summary import LIMIT, print_summary
from nvdlfw_inspect.report.table import extent, table_of, tally
from nvdlfw_inspect.report.templates import render
from nvdlfw_inspect.report.verdicts import Verdicts, judge
from nvdlfw_inspect.utils import in_notebook


def show(logdir: str | Path, limit: int = LIMIT, rank: int | None = None) -> None:
    """Shows the worst series of a run: displayed in a notebook, printed elsewhere.

    Without the extra `report` it is plain text.

    Args:
        logdir: the log directory of the run, which may still be going on.
        limit: rows of the table at the most.
        rank: read this rank only.

    Raises:
        LogError: there are no statistics in `logdir`.
    """
    verdicts = judge(read_run(logdir, rank))
    with suppress(MissingExtraError):
        if in_notebook():
            html = summary_html(verdicts, limit)
            display = require("IPython.display", "the summary")
            display.display(display.HTML(html))
            return
    print_summary(verdicts, limit)


def summary_html(verdicts: Verdicts, limit: int | None = LIMIT) -> str:
    """Returns the summary as a piece of HTML with its own style, for notebooks."""
    advice = advise(verdicts)
    return render(
        "summary.html.j2",
        headline=headline(verdicts, advice),
        level=verdicts.level,
        lines=[tally(verdicts), extent(verdicts)],
        table=table_of(verdicts, limit),
        advice=advice,
    )
