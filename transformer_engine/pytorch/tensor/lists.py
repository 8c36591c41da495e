"""What operations write, and those on lists of tensors, cut into operations on parts of lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

from transformer_engine.pytorch._torch_private import tree_leaves

T = TypeVar("T")

# Optimizers have such operations. They dequantise so much at a time.
_MOST_BYTES = 1 << 28


def parts_of_lists(
    kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each operation that takes a part; uncut where no list has this kind."""
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
