"""Finds the functions of a C++ or CUDA file by their braces, to count lines and parameters.

This is a heuristic: macros are not expanded. A function is taken to begin at a brace that follows a
parameter list and is not inside another function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COMMENT_OR_LITERAL = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""",
    re.DOTALL,
)
DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b[^()]*$")
NOT_A_NAME = {"decltype", "alignas", "requires", "__launch_bounds__", "__attribute__", "explicit"}
# What may stand between a parameter list and the body.
SIGNATURE_END = re.compile(
    r"\)\s*(?:(?:const|noexcept|override|final|mutable|&&?|requires\b.*|->.*)\s*)*$", re.DOTALL
)
MEMBER_INITIALIZER = re.compile(r"\)[^;]*:[^;]*[\w>]\s*$", re.DOTALL)


@dataclass(frozen=True)
class Function:
    """A function found in a source file."""

    name: str
    line: int
    lines: int
    parameters: int


def _blank(match: re.Match[str]) -> str:
    """Replaces a match by spaces, keeping its newlines, so that line numbers stay right."""
    return re.sub(r"[^\n]", " ", match[0])


def _parameter_list(head: str) -> tuple[str, int]:
    """Returns name and number of parameters, read from the text before a function's body."""
    candidates = re.finditer(r"(operator\s*\S+?|[~\w:]+|\])\s*\(", head)
    start = next((m for m in candidates if m[1] not in NOT_A_NAME), None)
    if start is None:
        return "?", 0
    depth, commas, empty = 1, 0, True
    for c in head[start.end() :]:
        depth += (c in "([{<") - (c in ")]}>")
        if depth == 0:
            break
        commas += c == "," and depth == 1
        empty = empty and c.isspace()
    return start[1], 0 if empty else commas + 1


def find_functions(source: str) -> list[Function]:
    """Returns the functions of one file in the order in which they end."""
    text = DIRECTIVE.sub(_blank, COMMENT_OR_LITERAL.sub(_blank, source))
    functions: list[Function] = []
    opened: list[tuple[str, str, int]] = []  # kind of brace, text before it, its line
    head, head_line, line, inside = "", 1, 1, 0
    for c in text:
        if c == "{":
            kind = "block" if inside else _brace_kind(head)
            opened.append((kind, head, head_line))
            inside += kind == "function"
            head = ""
        elif c == "}" and opened:
            kind, before, begin = opened.pop()
            head = ""
            if kind == "function":
                inside -= 1
                name, parameters = _parameter_list(before)
                functions.append(Function(name, begin, line - begin + 1, parameters))
            elif kind == "initializer":
                head, head_line = before + "()", begin
        elif c == ";" and not _in_parentheses(head):
            head = ""
        elif head or not c.isspace():
            head_line = head_line if head else line
            head += c
        line += c == "\n"
    return functions


def _in_parentheses(head: str) -> bool:
    return head.count("(") > head.count(")")


def _brace_kind(head: str) -> str:
    """Returns what a brace outside of all functions opens: function, initializer or block."""
    if SIGNATURE_END.search(head):
        return "function"
    if MEMBER_INITIALIZER.search(head) and not SCOPE.search(head):
        return "initializer"
    return "initializer" if _in_parentheses(head) else "block"
