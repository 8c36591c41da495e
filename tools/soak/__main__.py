"""Soak tests: long runs of what must not break, with figures for `docs/reliability.md`.

python tools/soak                        the short ones for some seconds each, as CI does
python tools/soak ops --seconds 3600     one, and its figures are written
python tools/soak ops --device cuda      the CPU compared with a GPU
"""

from __future__ import annotations

import argparse
import importlib
import sys

import table

SHORT_TESTS = ("documents", "states", "ops", "memory", "determinism")
TESTS = (*SHORT_TESTS, "parser", "kills")
SHORT = 4.0  # seconds


def main() -> int:
    """The exit status is 1 where something broke."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "names", nargs="*", choices=[*TESTS, []], help=f"which ({' '.join(SHORT_TESTS)})"
    )
    parser.add_argument("--seconds", type=float, help=f"for how long each ({SHORT:g})")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (1)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda where a test has that (cpu)")
    options = parser.parse_args()
    broken = False
    for name in options.names or SHORT_TESTS:
        more = {} if options.device == "cpu" else {"device": options.device}
        test = importlib.import_module(name)
        outcome = test.run(options.seconds or SHORT, options.seed, **more)
        outcome.show()
        if options.seconds:
            outcome.write()
            table.write()
        broken |= bool(outcome.failures)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
