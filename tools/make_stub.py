"""Writes transformer_engine/_C.pyi, from the docstrings of the built module.

    PYTHONPATH=. python tools/make_stub.py

pybind11 puts the signature of every function into the docstring. A test compares the file with the
module, so that a call which mypy accepts fits the function of the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

STUB = Path(__file__).parents[1] / "transformer_engine" / "_C.pyi"
WIDTH = 100
HEAD = """\
# Written by tools/make_stub.py. Each operation writes into tensors that the caller has allocated:
# shapes, dtypes and meaning are those of csrc/ops/<op>.h; transformer_engine.pytorch.kernels holds
# the callers.
from collections.abc import Sequence

from torch import Tensor
"""
# pybind11 accepts more types than are meant: anything with __int__ or __float__ is converted.
PLAIN = (
    (r"typing\.SupportsInt( \| typing\.SupportsIndex)?", "int"),
    (r"typing\.SupportsFloat( \| typing\.SupportsIndex)?", "float"),
    (r"typing\.Annotated\[(.*?), \"FixedSize\(\d+\)\"\]", r"\1"),
    (r"collections\.abc\.", ""),
    (r"torch\.Tensor", "Tensor"),
)


def split(parameters: str) -> list[str]:
    """The parameters of a signature, each as `name: type = default`."""
    found, depth = [""], 0
    for character in parameters:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [parameter.strip() for parameter in found if parameter.strip()]


def definition(signature: str, indent: str = "") -> str:
    """`def name(parameters) -> result: ...`, formatted as ruff formats it."""
    for pattern, meant in PLAIN:
        signature = re.sub(pattern, meant, signature)
    matched = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", signature)
    assert matched, signature
    name, parameters, result = matched.groups()
    listed = split(parameters)
    if listed and listed[0].startswith("self: "):
        listed[0] = "self"
    line = f"{indent}def {name}({', '.join(listed)}) -> {result}: ..."
    if len(line) <= WIDTH:
        return line
    lines = [f"{indent}    {parameter}," for parameter in listed]
    inner = f"{indent}    {', '.join(listed)}"
    if len(inner) <= WIDTH:
        lines = [inner]
    return "\n".join([f"{indent}def {name}(", *lines, f"{indent}) -> {result}: ..."])


def functions_of(owner: Any, module: ModuleType) -> Iterator[str]:
    """Signatures of the functions of a module or class, by name."""
    for name, value in sorted(vars(owner).items()):
        text = (getattr(value, "__doc__", None) or "").partition("\n")[0]
        if not isinstance(value, type) and text.startswith(f"{name}("):
            yield text.replace(f"{module.__name__}.", "")


def stub_of(module: ModuleType) -> str:
    """The text of the stub."""
    parts = [HEAD]
    classes = {n: v for n, v in vars(module).items() if isinstance(v, type)}
    for name, value in sorted(classes.items()):
        methods = [definition(text, indent="    ") for text in functions_of(value, module)]
        parts.append("\n".join([f"class {name}:", *methods, ""]))
    parts.append("\n".join([*map(definition, functions_of(module, module)), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    import torch  # noqa: F401  the module's libraries are found once torch is there

    from transformer_engine import _C

    STUB.write_text(stub_of(_C))
    print(f"wrote {STUB}")
