"""Runs benchmarks and renders the report: `python benchmarks [name ...]`; without names, all run.

Each `bench_<name>.py` runs in a process of its own, so that a failure does not stop the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent


def main(names: list[str]) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"unknown benchmarks: {', '.join(unknown)}; known: {', '.join(known)}")
        return 2
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    failed = []
    for name in names or known:
        print(f"=== {name}", flush=True)
        command = [sys.executable, str(HERE / f"bench_{name}.py")]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False)
        if done.returncode != 0:
            failed.append(name)
    report.main()
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
