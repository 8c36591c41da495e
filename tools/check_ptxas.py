"""Fails on kernels that spill registers or use a stack frame.

Reads the output of a build configured with TE_PTXAS_REPORT=ON. Kernels that may do so are listed
with their limits and the reason in tools/ptxas_allowed.toml.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

ALLOWED = Path(__file__).with_name("ptxas_allowed.toml")
FUNCTION = re.compile(r"Function properties for (\S+)")
USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Usage:
    """Local memory of one kernel, in bytes."""

    kernel: str
    stack: int
    spill: int


def parse(report: str) -> list[Usage]:
    """Returns the usage of every function in a ptxas report."""
    usages = []
    mangled = ""
    for line in report.splitlines():
        if match := FUNCTION.search(line):
            mangled = match[1]
        elif match := USAGE.search(line):
            stack, stores, loads = map(int, match.groups())
            usages.append(Usage(mangled, stack, stores + loads))
    names = "\n".join(u.kernel for u in usages)
    demangled = subprocess.run(["c++filt"], input=names, text=True, capture_output=True, check=True)
    kernels = demangled.stdout.splitlines()
    return [Usage(k, u.stack, u.spill) for k, u in zip(kernels, usages, strict=True)]


def is_allowed(usage: Usage, rules: list[dict[str, Any]]) -> bool:
    """Tells whether a rule covers the kernel and its numbers."""
    return any(
        re.search(rule["kernel"], usage.kernel)
        and usage.stack <= rule.get("stack", 0)
        and usage.spill <= rule.get("spill", 0)
        for rule in rules
    )


def main() -> int:
    """Checks the report named on the command line."""
    usages = parse(Path(sys.argv[1]).read_text())
    rules = tomllib.loads(ALLOWED.read_text()).get("allow", [])
    if unreasoned := [rule["kernel"] for rule in rules if not rule.get("reason")]:
        print(f"{ALLOWED.name}: no reason given for {unreasoned}")
        return 1
    bad = [u for u in usages if (u.stack or u.spill) and not is_allowed(u, rules)]
    for usage in bad:
        print(f"stack {usage.stack} B, spills {usage.spill} B: {usage.kernel}")
    print(f"ptxas: {len(usages)} kernels, {len(bad)} with spills or stack frames")
    if not usages:
        print("no kernel in the report: was TE_PTXAS_REPORT on and was anything compiled?")
    return 1 if bad or not usages else 0


if __name__ == "__main__":
    sys.exit(main())
