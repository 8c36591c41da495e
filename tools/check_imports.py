"""Checks the Python packages for import cycles, and for private names of torch.

A room is a folder of `transformer_engine.pytorch`, or a file directly in it. Neither modules nor
rooms may import each other in a cycle. Only one file may use private names of torch.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from check_layering import PACKAGES

ROOMS = "transformer_engine.pytorch"  # the package that is divided into rooms
MOST_FLAT = 12  # most files directly in that folder
# Imports between rooms that close a cycle and are still allowed; do not add any.
TOLERATED = {
    ("notices", "fp8"),
}

HOME = Path("transformer_engine/pytorch/_torch_private.py")  # the only user of private names
DOCUMENTED = re.compile(r"_foreach_\w+|_make_wrapper_subclass")
# Private attributes of objects of torch, also some without an underscore.
ATTRIBUTES = {
    *("_cdata", "_active_ddp_module", "_current_level", "_execution_engine"),
    *("_dynamo_static_input_type", "_torchdynamo_orig_callable", "co_freevars"),
    *("has_side_effect", "maybe_clear_saved_tensors", "_has_any_global_hook"),
}


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and name of each use of a private name of torch in a file."""
    known: dict[str, str] = {}  # names of the file that stand for something of torch
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        source = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        for alias in node.names:
            name = source + alias.name
            if name.partition(".")[0] == "torch":
                plain = "torch" if not source and not alias.asname else name
                known[alias.asname or plain.rpartition(".")[2]] = plain
                yield from _private(node.lineno, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.lineno, node.attr
        elif isinstance(node, ast.expr) and (name := _name(node, known)):
            yield from _private(node.lineno, name)


def _name(node: ast.expr, known: dict[str, str]) -> str:
    """The name of torch that an expression means; "" if it is no such name."""
    if isinstance(node, ast.Attribute):
        return (node.attr.startswith("_") and _dotted(node, known)) or ""
    if isinstance(node, ast.Constant):
        text = str(node.value)
        return text.replace(":", ".") if re.fullmatch(r"torch[\w.:]+", text) else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        owner, second = _dotted(node.args[0], known), node.args[1]
        if owner and node.func.id == "super":
            return f"{owner}._super"
        if owner and node.func.id == "getattr" and isinstance(second, ast.Constant):
            return f"{owner}.{second.value}"
    return ""


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    """The full name, such as `torch.a.b`, according to the imports; "" if it is not of torch."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, known)):
        return f"{owner}.{node.attr}"
    return ""


def _private(line: int, name: str) -> Iterator[tuple[int, str]]:
    parts = name.split(".")
    if parts[0] == "torch" and any(
        p.startswith("_") and not p.startswith("__") and not DOCUMENTED.fullmatch(p) for p in parts
    ):
        yield line, name


def modules_of(packages: Iterable[str], root: Path = Path()) -> dict[str, Path]:
    """The files of packages, by module name."""
    files = sorted(file for package in packages for file in (root / package).rglob("*.py"))
    names = [".".join(f.relative_to(root).with_suffix("").parts) for f in files]
    return {n.removesuffix(".__init__"): f for n, f in zip(names, files, strict=True)}


def imports(module: str, modules: dict[str, Path]) -> set[str]:
    """Modules that a module imports, also in functions, but not under TYPE_CHECKING."""
    found = set()
    package = module if modules[module].name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children: Iterable[ast.AST] = node.orelse
        else:
            children = ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(parts if node.level else ()), *filter(None, [node.module])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.add(full if full in modules else source)
        for child in children:
            visit(child)

    visit(ast.parse(modules[module].read_text()))
    return {name for name in found if name in modules and name != module}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a cycle, with the first one again at the end; empty if there is no cycle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def rooms_of(graph: dict[str, set[str]], packages: set[str]) -> dict[str, set[str]]:
    """For each room, the rooms that it imports. `__init__` files, which re-export, do not count."""

    def room(module: str) -> str:
        inside = module.removeprefix(f"{ROOMS}.")
        return inside if module in packages else inside.rpartition(".")[0] or inside

    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if module.startswith(f"{ROOMS}.") and module not in packages:
            others = {room(other) for other in imported if other.startswith(f"{ROOMS}.")}
            found.setdefault(room(module), set()).update(others - {room(module)})
    return found


def problems() -> Iterator[str]:
    """Yields a message for every broken rule."""
    modules = modules_of(PACKAGES)
    for file in modules.values():
        if file != HOME:
            for line, name in private_names(ast.parse(file.read_text())):
                yield f"{file}:{line}: {name} is private to torch; {HOME.name} alone may use it"
    graph = {module: imports(module, modules) for module in modules}
    if found := circle(graph):
        yield f"modules import in a circle: {' -> '.join(found)}"
    packages = {module for module, file in modules.items() if file.name == "__init__.py"}
    rooms = rooms_of(graph, packages)
    for one, other in sorted(TOLERATED):
        if other not in rooms.get(one, ()):
            yield f"TOLERATED: nothing imports {one} -> {other} any more; delete it"
        else:
            rooms[one].discard(other)
    if found := circle(rooms):
        yield f"folders of {ROOMS} import in a circle: {' -> '.join(found)}"
    flat = len(list(Path(*ROOMS.split(".")).glob("*.py")))
    if flat > MOST_FLAT:
        yield f"{flat} files lie flat in {ROOMS}, {MOST_FLAT} may"


def main() -> int:
    """Prints every broken rule."""
    found = list(problems())
    print(*found, f"imports: {len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
