"""The contribution of single GPU features: layers with all features, and with one turned off.

The environment variables of docs/how-to/gpus.md are read when the package is imported, so each row
is measured in its own process: forward and backward of a layer, replayed in a CUDA graph. `ratio`
is the time divided by that of the first row, which uses all features. `all` turns all of them off:
it runs on this GPU what an Ampere GPU would run.

    bench_switches.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from contenders import Size, our_layer, random, step
from harness import Report, require_gpu, time_graph

SIZES = (Size(1024, 4096, 16, 1024, 8), Size(4096, 16384, 32, 2048, 2))
PRECISIONS = ("bf16", "fp8 delayed")
OFF = {
    "native": {},
    "no clusters": {"TE_CLUSTERS": "0"},
    "no dependent launch": {"TE_DEPENDENT_LAUNCH": "0"},
    "99 KiB of shared memory": {"TE_SHARED_MEMORY_KIB": "99"},
    "no FP8 tensor cores": {"TE_FP8_TENSOR_CORES": "0"},
}
OFF["all"] = {name: value for settings in OFF.values() for name, value in settings.items()}
RESULT = "milliseconds: "


def measure() -> None:
    """Measure in this process, and print the times as JSON."""
    found = {}
    for size in SIZES:
        x = random(size.batch, size.sequence, size.hidden)
        for precision in PRECISIONS:
            layer = our_layer(size)
            timing = time_graph(step(layer, x, precision), repeats=20, cold=False)
            found[f"{size}, {precision}"] = round(timing.median_us / 1e3, 3)
            torch.cuda.empty_cache()
    print(RESULT + json.dumps(found))


def measured(settings: dict[str, str]) -> dict[str, float]:
    """Milliseconds of each case, in a process with these environment variables."""
    command = [sys.executable, str(Path(__file__)), "--here"]
    run = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith(RESULT)]
    return dict(json.loads(line.removeprefix(RESULT)))


def main() -> None:
    require_gpu()
    if "--here" in sys.argv:
        measure()
        return
    report, native = Report("switches"), dict[str, float]()
    for name, settings in OFF.items():
        times = measured(settings)
        native = native or times
        for case, milliseconds in times.items():
            ratio = round(milliseconds / native[case], 3)
            report.row(op=name, case=f"layer {case}", ms=milliseconds, ratio=ratio)
        report.save()


if __name__ == "__main__":
    main()
