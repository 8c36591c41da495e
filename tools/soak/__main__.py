"""Soak tests: long runs with random inputs and faults, with figures for `docs/reliability.md`.

python tools/soak                                 the short tests for some seconds each, as in CI
python tools/soak ops --seconds 3600 --jobs 16    one test in 16 processes
python tools/soak ops --device cuda               compares the CPU with a GPU
python tools/soak ops --seconds 3600 --write      writes its figures, also into the page
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import jobs
import table
from outcome import Outcome

SHORT_TESTS = ("documents", "states", "ops", "memory", "determinism", "hour")
TESTS = (*SHORT_TESTS, "parser", "kills", "large", "threads", "kernels")
SHORT = 4.0  # seconds


def main() -> int:
    """Run the tests; the exit status is 1 if one of them failed."""
    options = _options()
    broken = False
    for name in options.names or SHORT_TESTS:
        outcome = _run(name, options)
        if options.outcome:
            options.outcome.write_text(json.dumps(asdict(outcome)))
            return 0
        outcome.show()
        if options.write:
            outcome.write(_command(name, options))
            table.write()
        broken |= bool(outcome.failures)
    return int(broken)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("names", nargs="*", choices=[*TESTS, []], help=f"which ({' '.join(SHORT_TESTS)})")
    add("--seconds", type=float, default=SHORT, help=f"for how long each ({SHORT:g})")
    add("--seed", type=int, default=1, help="of everything that is drawn (1)")
    add("--jobs", type=int, default=1, help="processes, each with a seed of its own (1)")
    add("--device", default="cpu", help="cpu, or cuda where a test has that (cpu)")
    add("--write", action="store_true", help="write figures to results/ and docs/reliability.md")
    add("--outcome", type=Path, help=argparse.SUPPRESS)  # a file for the outcome of a job
    return parser.parse_args()


def _run(name: str, options: argparse.Namespace) -> Outcome:
    test, seconds = importlib.import_module(name), options.seconds
    if not options.outcome and hasattr(test, "prepare"):  # makes what all jobs share
        test.prepare()
    if options.jobs > 1:
        return jobs.run_jobs(name, seconds, options.seed, options.jobs, options.device)
    more = {} if options.device == "cpu" else {"device": options.device}
    outcome: Outcome = test.run(seconds, options.seed, **more)
    return outcome


def _command(name: str, options: argparse.Namespace) -> str:
    words = [name, "--seconds", f"{options.seconds:g}"]
    words += ["--jobs", str(options.jobs)] if options.jobs > 1 else []
    words += ["--device", options.device] if options.device != "cpu" else []
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
