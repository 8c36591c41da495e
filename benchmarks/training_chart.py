"""What `README.md` shows of complete trainings: a table, and a chart of tokens a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Document = dict[str, Any]

YARDSTICK = "torch, compiled"
# The rows that are shown, and their names and colours.
SHOWN = {
    "torch": ("torch", "#bab0ac"),
    YARDSTICK: ("torch.compile", "#79706e"),
    "ours bf16, in graphs": ("ours, bf16", "#9ecae9"),
    "ours fp8 delayed, in graphs": ("ours, FP8", "#4c78a8"),
}
BEGIN, END = "<!-- trainings: python benchmarks/report.py -->\n", "<!-- end of trainings -->\n"


def trainings(documents: dict[str, Document]) -> dict[str, dict[str, Any]]:
    """The rows that are shown by model and case, of models that have them all; small ones first."""
    found = {}
    for name, document in documents.items():
        if name.startswith("training_"):
            rows = {
                row["case"]: row for row in document["rows"] if row["op"].startswith("training")
            }
            if SHOWN.keys() <= rows.keys():
                found[rows[YARDSTICK]["op"].removeprefix("training ").split(" s")[0]] = rows
    return dict(sorted(found.items(), key=lambda item: -item[1][YARDSTICK]["tokens_per_s"]))


def training_table(documents: dict[str, Document]) -> list[list[str]]:
    """Thousands of tokens a second, how many times those of torch.compile, and peak memory."""
    lines = []
    for model, rows in trainings(documents).items():
        cells = [
            f"{row['tokens_per_s'] / 1e3:.0f} ({row['ratio']:.2f}x, {row['gib']:.0f} GiB)"
            for row in (rows[case] for case in SHOWN)
        ]
        lines.append([model, *cells])
    return [["thousand tokens a second", *[name for name, _ in SHOWN.values()]], *lines]


def draw_trainings(documents: dict[str, Document], target: Path) -> None:
    """A bar for each row and model: tokens a second over those of torch.compile."""
    import matplotlib  # noqa: PLC0415  the tables need no matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    found = trainings(documents)
    gray = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#808080")
    with pyplot.rc_context({"svg.hashsalt": "benchmarks", "font.size": 9, **gray}):
        figure, axes = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
        width = 0.8 / len(SHOWN)
        for number, (case, (name, color)) in enumerate(SHOWN.items()):
            ratios = [rows[case]["ratio"] for rows in found.values()]
            places = [place + (number - 1.5) * width for place in range(len(found))]
            bars = axes.bar(places, ratios, 0.94 * width, label=name, color=color)
            axes.bar_label(bars, fmt="%.2f", padding=1, fontsize=8)
        axes.set_xticks(range(len(found)), list(found))
        axes.set_ylabel("speed over torch.compile")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_yticks([])
        axes.margins(y=0.12)
        figure.legend(loc="outside upper center", ncols=len(SHOWN), frameon=False)
        figure.savefig(target, metadata={"Date": None}, transparent=True)
        pyplot.close(figure)


def put_into(page: Path, table: str) -> None:
    """Replace what stands between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{rest.split(END)[1]}")
