"""The debugger's report of two million records: CPU time, and size of the page. Needs no GPU."""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from synthetic_run import LAYERS_OF_BLOCK, STATISTICS, TENSORS, ill, write_run

RECORDS = 2_000_000
SERIES_OF_BLOCK = len(LAYERS_OF_BLOCK) * len(TENSORS) * len(STATISTICS)
SECONDS, MIB = 12.0, 2.25  # bars: CPU time and size for a long run


class Page(NamedTuple):
    """The time and size of a page."""

    seconds: float  # CPU time
    wall_seconds: float
    mib: float


def page_of(blocks: int, steps: int) -> Page:
    """Write the log of a synthetic run, and measure the command that makes the page from it."""
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder, "log"), Path(folder, "page.html")
        write_run(log, blocks, range(steps), ill)
        command = [sys.executable, "-m", "nvdlfw_inspect", "report", str(log), "-o", str(page)]
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Page(spent, took, page.stat().st_size / 2**20)


def main() -> None:
    report = Report("page")
    for name, blocks in (("long run", 3), ("deep model", 32)):
        steps = -(-RECORDS // (blocks * SERIES_OF_BLOCK))
        made = page_of(blocks, steps)
        case = f"{blocks * SERIES_OF_BLOCK} series of {steps} steps"
        bar = {"bar": 1.0, "better": "lower"} if name == "long run" else {}
        seconds = {"ms": round(1e3 * made.seconds), "wall_ms": round(1e3 * made.wall_seconds)}
        ratio = round(made.seconds / SECONDS, 3)
        report.row(op=f"page of a {name}, time of a core", case=case, **seconds, ratio=ratio, **bar)
        size, ratio = round(made.mib, 2), round(made.mib / MIB, 3)
        report.row(op=f"page of a {name}, MiB", case=case, mib=size, ratio=ratio, **bar)
    report.save()


if __name__ == "__main__":
    main()
