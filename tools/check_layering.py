"""Checks what each folder may include, import and read; the tables below are the rules."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

CPP = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(")

# Headers that only some files may include; the first pattern that matches counts.
RESTRICTED_HEADERS = {
    r"pybind11/.*|Python\.h": ("csrc/bindings/*",),
    r"cuda_(bf16|fp16|fp8)\.h": ("csrc/cuda/*", "csrc/core/float*.h"),  # storage types, under #if
    r"(cuda|cublas|cudnn|nccl).*": ("csrc/cuda/*",),
    r"yaml-cpp/.*": ("csrc/inspect/config*.cpp",),
    r"(torch|ATen|c10)/.*": (),
}
# Headers of ours that a file may include; the first pattern that matches the file counts. The
# bindings hold two extension modules: nvdlfw_inspect/_engine is inspect_*, transformer_engine/_C
# is everything else, and errors.* belongs to both.
ALLOWED_INCLUDES = (
    ("csrc/core/*", ("core/*",)),
    ("csrc/ops/*", ("core/*", "ops/*", "cuda/runtime.h")),
    ("csrc/cpu/*", ("core/*", "ops/*", "cpu/*", "cuda/runtime.h")),
    ("csrc/cuda/*", ("core/*", "ops/*", "cuda/*")),
    ("csrc/inspect/*", ("core/*", "inspect/*")),
    ("csrc/bindings/errors.*", ("core/*", "bindings/errors.h")),
    ("csrc/bindings/inspect_*", ("core/*", "inspect/*", "bindings/errors.h", "bindings/inspect_*")),
    ("csrc/bindings/*", ("core/*", "ops/*", "bindings/[!i]*", "cuda/runtime.h", "cuda/left_out.h")),
)
OUR_FOLDERS = {"core", "ops", "cpu", "cuda", "inspect", "bindings"}
PACKAGES = ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect")
# Modules that a Python package must not import.
FORBIDDEN_IMPORTS = {
    "nvdlfw_inspect": {"torch", "transformer_engine"},
}
ENVIRONMENT_READER = "_env.py"  # in each Python package the only reader of the environment
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def check_cpp(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and message for each rule that a C++ file breaks."""
    text = path.read_text()
    for match in INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start(1)) + 1
        for message in _check_include(path, match[1]):
            yield line, message
    for match in GETENV.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield line, f"reads the environment; only {ENVIRONMENT_READER} of a Python package does"
    yield from _check_kernels(text)


def _check_kernels(text: str) -> Iterator[tuple[int, str]]:
    """Checks that kernels follow the rules of csrc/cuda/device/dependent_launch.cuh."""
    if (chevrons := text.find("<<<")) >= 0:
        yield text.count("\n", 0, chevrons) + 1, "launches by <<<; use launch_dependent"
    kernels = text.count("__global__")
    follow = len(re.findall(r"\b(?:follow|await)_previous_kernel\(\);", text))
    if kernels and kernels != follow:
        yield 1, f"has {kernels} kernels and {follow} calls of follow_previous_kernel: one in each"


def _check_include(path: Path, header: str) -> Iterator[str]:
    if header.partition("/")[0] in OUR_FOLDERS:
        allowed = next((a for files, a in ALLOWED_INCLUDES if fnmatchcase(str(path), files)), ())
        if not any(fnmatchcase(header, pattern) for pattern in allowed):
            yield f"must not include {header}; it may include {' '.join(allowed)}"
        return
    for pattern, places in RESTRICTED_HEADERS.items():
        if re.fullmatch(pattern, header):
            if not any(fnmatchcase(str(path), place) for place in places):
                yield f"includes <{header}>, allowed in {' '.join(places) or 'no file'}"
            return


def check_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and message for each rule that a file of a Python package breaks."""
    forbidden = FORBIDDEN_IMPORTS.get(path.parts[0], set())
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.stmt, ast.expr)):
            continue
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        for module in modules:
            if module.partition(".")[0] in forbidden:
                yield node.lineno, f"{path.parts[0]} must not import {module}"
        reader = Path(path.parts[0], ENVIRONMENT_READER)
        if path != reader and _reads_environment(node):
            yield node.lineno, f"reads the environment; only {reader} does"


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return (
            node.attr in ENVIRONMENT and isinstance(node.value, ast.Name) and node.value.id == "os"
        )
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in ENVIRONMENT for alias in node.names)
    return False


def main() -> int:
    """Prints every broken rule."""
    cpp = [p for p in sorted(Path("csrc").rglob("*")) if p.suffix in CPP]
    python = [p for package in PACKAGES for p in sorted(Path(package).rglob("*.py"))]
    problems = [(p, *found) for p in cpp for found in check_cpp(p)]
    problems += [(p, *found) for p in python for found in check_python(p)]
    for path, line, message in problems:
        print(f"{path}:{line}: {message}")
    print(f"layering: {len(problems)} problems in {len(cpp)} C++ and {len(python)} Python files")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
