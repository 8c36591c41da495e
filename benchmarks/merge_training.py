"""Merges the results of a new run of bench_training into the results of earlier runs.

    merge_training.py FOLDER      the folder with training_*.json of the new run

A row of the new run replaces the earlier one. All other rows stay, with the commit at which they
were measured. Ratios are computed again, relative to the yardstick of the merged table. Rows that
compare with other libraries are computed from our rows of the new run and all rows of others;
comparisons for which the new run has no rows stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_training import ARCHITECTURES, ROWS, add_ratios, judge
from harness import Report

RESULTS = Path(__file__).parent / "results"

Document = dict[str, Any]


def merged(name: str, old: Document, new: Document) -> Document:
    """The merged results of an earlier run and a new one; `name` is that of the file."""
    _, model, *largest = name.split("_")
    measured, earlier = ({row["case"]: row for row in _measured(run)} for run in (new, old))
    rows = [
        measured.get(case) or {"commit": old["commit"], **earlier[case]}
        for case in {**earlier, **measured}
    ]
    add_ratios(rows)
    by_case = {str(row): row for row in ROWS}
    known = [row for row in rows if row["case"] in by_case]
    judged = [row for row in known if "commit" not in row or not row["case"].startswith("ours")]
    report = Report(name)  # only prints the comparisons; it is not saved
    found = {by_case[row["case"]]: row for row in judged}
    judge(report, model, ARCHITECTURES[model], found, bool(largest))
    again = {row["op"] for row in report.rows}
    stay = [row for row in old["rows"] if "tokens_per_s" not in row and row["op"] not in again]
    stay = [{"commit": old["commit"], **row} for row in stay]
    return {**new, "rows": [*rows, *report.rows, *stay]}


def _measured(document: Document) -> list[dict[str, Any]]:
    """The measured rows, without comparisons."""
    return [row for row in document["rows"] if "tokens_per_s" in row]


def main(folders: Sequence[str]) -> None:
    """Merge each file of the folders into the file of the same name in results/."""
    for path in sorted(path for folder in folders for path in Path(folder).glob("training_*.json")):
        if path.stem.split("_")[1] not in ARCHITECTURES:  # a file of bench_training_ranks
            continue
        target = RESULTS / path.name
        new = json.loads(path.read_text())
        document = merged(path.stem, json.loads(target.read_text()), new)
        target.write_text(json.dumps(document, indent=1) + "\n")
        print(f"merged {path} into {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
