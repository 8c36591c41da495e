"""`pointed`: adds the line of the configuration and a caret to an error message."""

from __future__ import annotations

import re

PLACE = re.compile(r"^(?P<origin>[^\n]*?):(?P<line>\d+):(?P<column>\d+): ")
MARGIN = "    "
WIDTH = 120  # of the line, as far as it is shown


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
    if number > len(lines) or column > WIDTH:
        return problem
    line = lines[number - 1].rstrip().replace("\t", " ")
    return f"{problem}\n{MARGIN}{line[:WIDTH]}\n{MARGIN}{' ' * (column - 1)}^"
