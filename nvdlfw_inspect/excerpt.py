"""The line of a configuration that a problem is about."""

from __future__ import annotations

import re

PLACE = re.compile(r"^(?P<origin>[^\n]*?):(?P<line>\d+):(?P<column>\d+): ")
MARGIN = "    "
WIDTH = 120  # of what is shown of the line
BEFORE = 80  # of that before the caret, in a line that is longer


def pointed(problem: str, source: object) -> str:
    r"""Return the problem with its line below, and a caret where it begins.

    Args:
        problem: As the engine says it, `origin:line:column: ...`.
        source: The bytes of the file. What else comes has no lines, and no line is added.

    Example:
        >>> print(pointed("c.yaml:2:3: expected spaces, got a tab", b"a:\n  \tb: 1\n"))
        c.yaml:2:3: expected spaces, got a tab
              b: 1
              ^
    """
    place = PLACE.match(problem)
    if place is None or not isinstance(source, bytes):
        return problem
    lines = source.decode("utf-8-sig", "replace").split("\n")
    number, column = int(place["line"]), int(place["column"])
    if number > len(lines):
        return problem
    line, caret = lines[number - 1].rstrip().replace("\t", " "), column - 1
    if caret >= WIDTH:
        line, caret = f"...{line[caret - BEFORE :]}", BEFORE + len("...")
    return f"{problem}\n{MARGIN}{line[:WIDTH]}\n{MARGIN}{' ' * caret}^"
