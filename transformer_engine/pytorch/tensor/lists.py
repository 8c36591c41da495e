"""Finds what an operation writes, and cuts an operation on long lists of tensors into several.

Optimizers call `torch._foreach_*` operations on all parameters. These run on dequantised values, so
short parts of the lists need less memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

from transformer_engine.pytorch._torch_private import tree_leaves

T = TypeVar("T")

# The dequantised values of a part have about so many bytes.
_MOST_BYTES = 1 << 28


def parts_of_lists(
    kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the arguments of each operation on a part; all at once if no list has this kind."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
    quantized = [a for a in lists if any(isinstance(t, kind) for t in a)]
    if not quantized:
        yield args, kwargs
        return
    count, start, size = len(quantized[0]), 0, 0
    for i, tensors in enumerate(zip(*quantized, strict=True)):
        size += sum(t.nbytes for t in tensors)
        if size < _MOST_BYTES and i + 1 < count:
            continue
        part = partial(_part, count, slice(start, i + 1))
        yield tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}
        start, size = i + 1, 0


def _part(count: int, where: slice, value: Any) -> Any:
    return value[where] if isinstance(value, list | tuple) and len(value) == count else value


def written_by(
    func: Any, kind: type[T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[T]:
    """The tensors of a kind that an operation writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, kind):
                yield leaf
