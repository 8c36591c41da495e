"""`pointed`: adds the line of the configuration and a caret to an error message."""

from __future__ import annotations

import re

PLACE = re.compile(r"^(?P<origin>[^\n]*?):(?P<line>\d+):(?P<column>\d+): ")
MARGIN = "    "
WIDTH = 120  # most characters of the line that are shown
BEFORE = 80  # characters shown before the caret, if it lies beyond WIDTH


def pointed(problem: str, source: object) -> str:
    r"""Return the problem with its line below, and a caret where it begins.

    Args:
        problem: Message of the engine, `origin:line:column: ...`.
        source: The bytes of the file. For a dict, which has no lines, the problem stays as it is.

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
