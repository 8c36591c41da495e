"""Writes the results of `fidelity.py` and `fidelity_gemms.py` into docs/explanation/fidelity.md.

python benchmarks/fidelity_page.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from fidelity import FP8, KINDS, RESULTS, differences, lines, pairs_of, percent, settings_of
from fidelity_gemms import GEMMS
from pages import figure, put_into
from report import table

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "explanation/fidelity.md"
FIGURE = DOCS / "figures/fidelity_125m.svg"
NAMES = [settings_of(kind, 0, "125m", 1, "cpu").label for kind in KINDS]


def differences_table(done: list[dict[str, Any]]) -> str:
    """A table with a row for each precision, in the order of `KINDS`."""
    cells = []
    for row in sorted(differences(done), key=lambda row: NAMES.index(row["precision"])):
        apart = f"{row['percent']:+.1f} ± {row['interval']:.1f} %"
        others = row["precision"] != "bf16"
        cells.append([row["precision"], str(row["seeds"]), f"{row['loss']:.4f}", apart * others])
    return table(["precision", "seeds", "validation loss", "above bf16"], cells)


def gemms_table(rows: list[dict[str, Any]]) -> str:
    """A table: a row for each choice of FP8 GEMMs, a column for each recipe; means over steps."""

    def errors(case: str) -> str:
        found = [row for row in rows if row["case"] == case]
        means = [statistics.mean(row[name] for row in found) for name in ("error", "systematic")]
        return " / ".join(f"{100 * mean:.1f} %" for mean in means)

    recipes = [kind["recipe"] for kind in FP8]
    cells = [["none, all in bf16", *[errors("bf16")] * len(recipes)]]
    for gemms in ("all GEMMs", *GEMMS):
        cells.append([gemms, *[errors(f"fp8 {recipe}, {gemms}") for recipe in recipes]])
    return table(["in FP8", *recipes], cells)


def draw(done: list[dict[str, Any]], target: Path) -> None:
    """Draw the difference of the training loss from bf16 over the steps."""
    pairs = pairs_of(done)
    names = [name for name in NAMES[1:] if name in pairs]
    size = (2.1 * len(names), 2.4)
    with figure(target, 1, len(names), figsize=size, sharey=True, squeeze=False) as (_, axes):
        for axis, name in zip(axes[0], names, strict=True):
            curves = [zip(a["curve"], b["curve"], strict=True) for a, b in pairs[name]]
            found = [percent(list(losses)) for losses in zip(*curves, strict=True)]
            steps = [pairs[name][0][0]["steps"] * (i + 0.5) / len(found) for i in range(len(found))]
            below, above = zip(*[(mean - half, mean + half) for mean, half in found], strict=True)
            axis.axhline(0.0, linewidth=0.6, color="gray")
            axis.fill_between(steps, below, above, color="#4c78a8", alpha=0.3, linewidth=0)
            axis.plot(steps, [mean for mean, _ in found], color="#4c78a8", linewidth=1.2)
            axis.set_title(name.replace(", ", ",\n"), fontsize=8)
            axis.set_xlabel("step")
        axes[0, 0].set_ylabel("training loss above bf16, %")


def main() -> None:
    """Write tables and figure from the files of results."""
    done = lines(RESULTS / "fidelity_125m.jsonl")
    put_into(PAGE, "differences", differences_table(done))
    draw(done, FIGURE)
    looks = json.loads((RESULTS / "fidelity_gemms.json").read_text())["rows"]
    put_into(PAGE, "gemms", gemms_table(looks))
    print(f"wrote {PAGE} and {FIGURE} from {len(done)} trainings")


if __name__ == "__main__":
    main()
