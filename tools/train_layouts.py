#!/usr/bin/env python3
"""Trains the GPT of examples/ in every layout of ranks, and writes the losses into a how-to.

python tools/train_layouts.py             # CPUs and gloo; several minutes
python tools/train_layouts.py --steps 20  # fewer steps; only prints the table
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/how-to/many_gpus.md"
STEPS = 100
SIZE = "--layers 2 --hidden 64 --heads 4 --seq 64 --batch 8 --lr 3e-3 --validate-every 1000"
LAYOUTS = (
    (2, "--ddp"),
    (2, "--fsdp"),
    (2, "--tp 2"),
    (2, "--tp 2 --sp"),
    (2, "--cp 2"),
    (4, "--tp 2 --sp --fsdp"),
    (4, "--tp 2 --sp --ddp"),
    (4, "--tp 2 --sp --cp 2"),
    (4, "--cp 2 --fsdp"),
)
PRECISIONS = ("fp32", "fp8")


def losses(folder: Path, ranks: int, layout: str, precision: str, steps: int) -> torch.Tensor:
    """The loss of every step of a run."""
    checkpoint = folder / "run.pt"
    checkpoint.unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if layout else []
    subprocess.run(
        [
            *(sys.executable, *launcher, str(ROOT / "examples/train_gpt.py")),
            *(*SIZE.split(), *layout.split(), "--steps", str(steps), "--device", "cpu"),
            *("--precision", precision, "--sample", "0", "--plot", str(folder / "plot.png")),
            *("--checkpoint", str(checkpoint)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    found: torch.Tensor = torch.load(checkpoint)["losses"]
    return found


def table(steps: int) -> str:
    """A table: the loss of the last step, and the largest relative difference from one process."""
    heads = [f"{precision}: last loss | furthest apart" for precision in PRECISIONS]
    lines = [
        f"| layout | ranks | {' | '.join(heads)} |",
        "|---|---|" + "---|---|" * len(PRECISIONS),
    ]
    alone: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, layout in ((1, ""), *LAYOUTS):
            cells = []
            for precision in PRECISIONS:
                found = losses(Path(folder), ranks, layout, precision, steps)
                expected = alone.setdefault(precision, found)
                apart = float(((found - expected) / expected).abs().max())
                cells += [f"{found[-1]:.5f}", f"{apart:.1e}" if layout else ""]
            lines.append(
                f"| {f'`{layout}`' if layout else 'one process'} | {ranks} | {' | '.join(cells)} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Train all layouts; write the table into the page if the number of steps is the default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    text = table(steps)
    if steps == STEPS:
        marks = re.compile(r"(<!-- losses -->\n).*?(<!-- end of losses -->)", re.DOTALL)
        PAGE.write_text(marks.sub(rf"\1\n{text}\n\n\2", PAGE.read_text()))


if __name__ == "__main__":
    main()
