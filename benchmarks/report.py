"""Makes benchmarks/README.md, charts, and tables of README.md from benchmarks/results/*.json.

Run `python benchmarks/report.py` after the benchmarks; `python benchmarks` runs both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from goals import GOALS, Goal
from pages import put_into
from training_chart import draw_trainings, largest_table, training_table

HERE = Path(__file__).resolve().parent
INTRODUCTION = """\
# Benchmarks

This page is made by `benchmarks/report.py` from `benchmarks/results/*.json`; `make bench` measures
again.

`ratio` is the time of a reference divided by ours, both from the same run: with 1.00 both are
equally fast, with more ours is faster. For memory-bound kernels the reference is a device copy that
moves as many bytes as the kernel must move once, from cold caches. Times are medians; the JSON
files have the 10th and 90th percentiles.

`bar` is the value that this project wants to reach. In tables whose bars begin with `<=`, lower is
better: there `ratio` is ours divided by the reference, or, for layers, milliseconds and MiB. `best
peer` is the best value of other libraries on the same kind of GPU; TE is NVIDIA's package.
"""

Row = dict[str, Any]
Document = dict[str, Any]


def load(folder: Path) -> dict[str, Document]:
    """The results in a folder, by the name of the benchmark."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def is_met(row: Row) -> bool:
    """Whether a row with a bar reaches it."""
    if row.get("better") == "lower":
        return row["ratio"] <= row["bar"]
    return row["ratio"] >= row["bar"]


def rows_of(goal: Goal, documents: dict[str, Document]) -> list[Row]:
    """The rows that a goal covers."""
    return [
        row
        for name, document in documents.items()
        for row in document["rows"]
        if "bar" in row and "ratio" in row and goal.covers(name, row["op"])
    ]


def measured(rows: list[Row]) -> str:
    """The range of ratios and how many rows meet the bar, like `0.87 - 0.93, 3 of 4 met`."""
    if not rows:
        return "not measured"
    ratios = sorted(row["ratio"] for row in rows)
    spread = f"{ratios[0]:.2f}"
    if f"{ratios[-1]:.2f}" != spread:
        spread += f" - {ratios[-1]:.2f}"
    met = sum(map(is_met, rows))
    return f"{spread}, met" if met == len(rows) else f"{spread}, {met} of {len(rows)} met"


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table; `|` in a cell is escaped."""
    cells = [[cell.replace("|", r"\|") for cell in line] for line in [header, *lines]]
    cells.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def summary(documents: dict[str, Document]) -> str:
    lines = [[goal.work, goal.bar, measured(rows_of(goal, documents)), goal.peer] for goal in GOALS]
    return table(["work", "bar", "measured", "best peer"], lines)


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def verdict(row: Row) -> str:
    if "bar" not in row or "ratio" not in row:
        return ""
    sign = "<=" if row.get("better") == "lower" else ">="
    return f"{sign} {row['bar']:.2f} {'met' if is_met(row) else '**missed**'}"


def details(name: str, document: Document) -> str:
    """The section of a benchmark, with a table of all rows."""
    rows = document["rows"]
    hidden = {"bar", "better", "p10_us", "p90_us", "copy_us"}
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in hidden))
    lines = [[format_value(row.get(key, "")) for key in columns] + [verdict(row)] for row in rows]
    where = f"{document['gpu']}, torch {document['torch']}, CUDA {document['cuda']}"
    when = f"commit {document['commit']}, {document['date'][:10]}"
    return f"## {name}\n\n{where}, {when}.\n\n{table([*columns, 'bar'], lines)}\n"


def judged(documents: dict[str, Document]) -> Iterator[tuple[str, Row]]:
    """Rows of the chart: those of memory-bound kernels that carry a bar."""
    for document in documents.values():
        for row in document["rows"]:
            if "bar" in row and "copy_us" in row:
                yield f"{row['op']}  {row['case']}", row


def draw(documents: dict[str, Document], target: Path) -> bool:
    """Draw fractions of copy bandwidth and the bars; False if there is nothing to draw."""
    chart = list(judged(documents))
    if not chart:
        return False
    import matplotlib  # noqa: PLC0415  the tables need no matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    pyplot.rcParams["svg.hashsalt"] = "benchmarks"  # the same results give the same file
    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.24 * len(chart)), layout="constrained")
    places = range(len(chart))
    colors = ["#4c78a8" if is_met(row) else "#e45756" for _, row in chart]
    axes.barh(places, [row["ratio"] for _, row in chart], color=colors)
    axes.scatter([row["bar"] for _, row in chart], places, marker="|", s=90, color="black")
    axes.set_yticks(places, [label for label, _ in chart], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("fraction of copy bandwidth (black mark: the bar to reach)")
    axes.margins(y=0.01)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
    return True


def render(documents: dict[str, Document], has_chart: bool) -> str:
    parts = [INTRODUCTION, summary(documents) + "\n"]
    if has_chart:
        parts.append("![Fractions of copy bandwidth](chart.svg)\n")
    parts += [details(name, document) for name, document in documents.items()]
    return "\n".join(parts)


def main() -> None:
    """Render all files of results."""
    documents = load(HERE / "results")
    has_chart = draw(documents, HERE / "chart.svg")
    (HERE / "README.md").write_text(render(documents, has_chart))
    draw_trainings(documents, HERE / "trainings.svg")
    for name, of_trainings in (("trainings", training_table), ("largest", largest_table)):
        header, *lines = of_trainings(documents)
        put_into(HERE.parent / "README.md", name, table(header, lines))
    print(f"wrote {HERE / 'README.md'} from {len(documents)} results")


if __name__ == "__main__":
    main()
