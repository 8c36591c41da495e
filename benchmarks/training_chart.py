"""What `README.md` shows of complete trainings: two tables, and a chart of tokens per second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pages import figure

Document = dict[str, Any]

YARDSTICK = "torch, compiled"
# The rows that are shown, and their names and colours.
SHOWN = {
    "torch": ("torch", "#bab0ac"),
    YARDSTICK: ("torch.compile", "#79706e"),
    "torchao, compiled": ("torchao, FP8", "#d4a6a0"),
    "ours bf16, in graphs": ("ours, bf16", "#9ecae9"),
    "ours fp8 delayed, in graphs": ("ours, FP8", "#4c78a8"),
    "ours fp8 delayed, fp8 head, in graphs": ("ours, FP8 with head", "#2a4d75"),
}


def trainings(documents: dict[str, Document], kind: str = "training ") -> dict[str, dict[str, Any]]:
    """The rows of `SHOWN`, by model and case, of models that have all of them, fastest first."""
    found = {}
    for name, document in documents.items():
        if name.startswith("training_"):
            rows = {row["case"]: row for row in document["rows"] if row["op"].startswith(kind)}
            if SHOWN.keys() <= rows.keys():
                found[rows[YARDSTICK]["op"].removeprefix(kind).split(" s")[0]] = rows
    return dict(sorted(found.items(), key=lambda item: -item[1][YARDSTICK]["tokens_per_s"]))


def training_table(documents: dict[str, Document]) -> list[list[str]]:
    """A table: thousands of tokens per second, ratio to torch.compile, and peak memory."""
    return _table(trainings(documents), "thousand tokens a second", "{gib:.1f} GiB")


def largest_table(documents: dict[str, Document]) -> list[list[str]]:
    """The same table with the largest batch, and its number of sequences instead of memory."""
    found = trainings(documents, "largest batch of ")
    return _table(found, "with the largest batch in 80 GiB", "{batch} sequences")


def _table(found: dict[str, dict[str, Any]], title: str, size: str) -> list[list[str]]:
    cell = "{thousands:.0f} ({ratio:.2f}x, " + size + ")"
    lines = [
        [
            model,
            *[
                cell.format(**rows[case], thousands=rows[case]["tokens_per_s"] / 1e3)
                for case in SHOWN
            ],
        ]
        for model, rows in found.items()
    ]
    return [[title, *[name for name, _ in SHOWN.values()]], *lines]


def draw_trainings(documents: dict[str, Document], target: Path) -> None:
    """Draw a bar for each row and model: tokens per second relative to torch.compile."""
    found, width = trainings(documents), 0.8 / len(SHOWN)
    with figure(target, figsize=(7, 2.8)) as (whole, axes):
        for number, (case, (name, color)) in enumerate(SHOWN.items()):
            ratios = [rows[case]["ratio"] for rows in found.values()]
            places = [
                place + (number - (len(SHOWN) - 1) / 2) * width for place in range(len(found))
            ]
            bars = axes.bar(places, ratios, 0.94 * width, label=name, color=color)
            axes.bar_label(bars, fmt="%.2f", padding=1)
        axes.set_xticks(range(len(found)), list(found))
        axes.set_ylabel("speed over torch.compile")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_yticks([])
        axes.margins(y=0.12)
        whole.legend(loc="outside upper center", ncols=len(SHOWN) // 2, frameon=False)
