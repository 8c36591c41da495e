"""Checks that files, functions and parameter lists stay small; ruff checks the complexity (C901).

A file has at most 400 lines. A function has at most 60 lines (without its docstring) and 8
parameters (without self, cls and ctx). Exceptions are listed in tools/budget_exceptions.toml, each
with a reason; an exception that is no longer needed is an error.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomllib
from cpp_functions import find_functions

LIMITS = {"file": 400, "function": 60, "parameters": 8}
PYTHON = {".py", ".pyi"}
CPP = {".h", ".cpp", ".cu", ".cuh"}
OTHER = {".sh", ".cmake", ".txt", ".toml"}
EXCEPTIONS = Path(__file__).with_name("budget_exceptions.toml")


@dataclass(frozen=True)
class Measure:
    """One number of one file or function; `key` names it in the list of exceptions."""

    budget: str
    key: str
    line: int
    value: int


def python_functions(source: str, path: str) -> Iterator[Measure]:
    """Measures every function of a Python file."""

    def visit(node: ast.AST, scope: str) -> Iterator[Measure]:
        for child in ast.iter_child_nodes(node):
            name = scope
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{scope}.{child.name}".lstrip(".")
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                key = f"{path}::{name}"
                yield Measure("function", key, child.lineno, _code_lines(child))
                yield Measure("parameters", key, child.lineno, _parameters(child))
            yield from visit(child, name)

    yield from visit(ast.parse(source), "")


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = function.args
    named = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([n for n in named if n not in ("self", "cls", "ctx")])


def measure(path: Path) -> Iterator[Measure]:
    """Measures a file and all its functions."""
    source = path.read_text()
    yield Measure("file", str(path), 1, source.count("\n"))
    if path.suffix in PYTHON:
        yield from python_functions(source, str(path))
    elif path.suffix in CPP:
        for f in find_functions(source):
            yield Measure("function", f"{path}::{f.name}", f.line, f.lines)
            yield Measure("parameters", f"{path}::{f.name}", f.line, f.parameters)


def source_files() -> list[Path]:
    """Lists the files of the project, committed or not, to which the limits apply."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()
    suffixes = PYTHON | CPP | OTHER
    return [p for p in map(Path, listed) if p.suffix in suffixes and p.exists()]


def limit_for(m: Measure, exceptions: list[dict[str, Any]]) -> tuple[int, set[int]]:
    """Returns the limit of a measure and the positions of the exceptions that raise it."""
    matching = {
        i
        for i, e in enumerate(exceptions)
        if e["budget"] == m.budget and fnmatchcase(m.key, e["where"])
    }
    return max([LIMITS[m.budget], *(exceptions[i]["limit"] for i in matching)]), matching


def main() -> int:
    """Prints what is over budget, and the largest of each kind."""
    exceptions = tomllib.loads(EXCEPTIONS.read_text()).get("exception", [])
    problems = [
        f"{EXCEPTIONS.name}: {e['where']}: no reason" for e in exceptions if not e["reason"]
    ]
    needed: set[int] = set()
    largest: dict[str, Measure] = {}
    for m in (m for path in source_files() for m in measure(path)):
        if m.budget not in largest or m.value > largest[m.budget].value:
            largest[m.budget] = m
        if m.value > LIMITS[m.budget]:
            limit, used = limit_for(m, exceptions)
            needed |= used
            if m.value > limit:
                where = m.key.replace("::", f":{m.line}: ", 1)
                problems.append(f"{where}: {m.budget} has {m.value}, limit {limit}")
    for i, e in enumerate(exceptions):
        if i not in needed:
            problems.append(f"{EXCEPTIONS.name}: {e['where']}: {e['budget']} needs no exception")
    print(*problems, sep="\n", end="\n" if problems else "")
    for budget, m in largest.items():
        print(f"largest {budget}: {m.value} ({m.key})")
    print(f"budget: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
