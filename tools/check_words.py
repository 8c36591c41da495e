"""Refuses names that this project has given up, and says which name took the place of each.

Words that nobody needs otherwise are refused everywhere: code, comments, documents. Words of plain
English are refused as identifiers only: Python's names, and the types and variables of C++.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".md", ".sh"}
EXEMPT = {"tools/check_words.py", "tests/test_check_words.py"}

RETIRED = {
    r"whole_layers?": "fused layer",
    r"tapes?|Tapes?": "recording",
    r"run_outside|begin_in_region": "select_plan, select_recompute_plan",
    r"rehears(?:es|als?|ing)": "in_first_forward",
    r"runs_again": "is_recompute",
    r"Demands?|\w+_demand": "OperandRequest, request",
    r"of_(?:query|key)": "query_..., key_...: what it is",
    r"turn_back|_Turn": "rope_backward, RopeFunction",
    r"writes_unseen|Uncast": "has_side_effects, PendingCast",
    r"unsettled|settles": "flush",
    r"OneWeight|PlannedChain": "SingleGemmModule, SingleStageModule",
    r"empty_whole|whole_of|as_it_lies": "empty_packed, packed_base, is_readable",
    r"note_(?:amaxes|scope|states)": "record_...",
    r"pass_on|sum_own|swap_stack": "send_to_next, reduce_scatter_stack, all_to_all_stack",
    r"Unfinished|FirstParameters": "ParamGradTask",
}
IDENTIFIERS = {
    "Place": "BufferSlice, RecomputeContext, PackedLayout, ConfigPath",
    "Region": "RecomputeRegion, MemoryRange",
    "Landing": "PendingCopy",
    "Account": "CostCounter",
    "capturing": "is_capturing, capture_into",
    "demand": "request",
    "given": "explicit_..., or the argument's name",
    "kept": "saved, cached, fp8_weight: what it is",
    "landed": "is_ready",
    "noted": "recorded",
    "remembered": "memoize",
    "turned": "rotated, rotary_dim",
}
FOREIGN = re.compile(r"from hypothesis import|@given\(")  # the name of another library
_RETIRED = {re.compile(rf"(?<!\w)(?:{words})(?!\w)"): use for words, use in RETIRED.items()}
_CPP = re.compile(r"//.*|\"(?:[^\"\\]|\\.)*\"")  # comments and strings, which are prose


def names(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yields line and name for each identifier of a source file."""
    if path.suffix in {".py", ".pyi"}:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and not FOREIGN.search(token.line):
                yield token.start[0], token.string
    elif path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, name) for name in re.findall(r"\w+", _CPP.sub("", line)))


def check(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yields line and message for each retired name."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, use in _RETIRED.items():
            for match in pattern.finditer(line):
                yield number, f"{match[0]!r} is retired: {use}"
    for number, name in names(path, text):
        if name in IDENTIFIERS:
            yield number, f"{name!r} is no name here: {IDENTIFIERS[name]}"


def main() -> int:
    """Check every file that git knows."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    paths = [Path(name) for name in listed.stdout.split("\n") if name not in EXEMPT]
    paths = [path for path in paths if path.suffix in SUFFIXES and path.is_file()]
    found = [(path, *one) for path in paths for one in check(path, path.read_text())]
    for path, line, message in found:
        print(f"{path}:{line}: {message}")
    print(f"words: {len(found)} retired names in {len(paths)} files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
