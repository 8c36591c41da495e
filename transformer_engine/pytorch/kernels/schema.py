"""The schema with which an op is registered in torch, made from its function's annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch

_KINDS = {
    torch.Tensor: "Tensor",
    torch.dtype: "ScalarType",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
}


class Argument(NamedTuple):
    """`kind name`, as a schema writes it; `default` is the function's default as text, or ""."""

    kind: str
    name: str
    default: str


class Schema(NamedTuple):
    """The operator `name(kind name, ...) -> results`; nothing in it has a default."""

    name: str
    arguments: tuple[Argument, ...]
    results: str

    def __str__(self) -> str:
        arguments = ", ".join(f"{argument.kind} {argument.name}" for argument in self.arguments)
        return f"{self.name}({arguments}) -> {self.results}"


def schema_of(function: Callable[..., Any], writes: Collection[str] = ()) -> Schema:
    """The schema of a function; keyword-only arguments are not the operator's.

    Args:
        function: has annotations: tensors, dtypes, numbers, strings, and lists, tuples or
            sequences of one of them; None for what may be absent.
        writes: arguments whose memory is written to.

    Raises:
        TypeError: an annotation that no operator can have, or an unknown name in `writes`.

    Example:
        >>> def scale(x: torch.Tensor, by: float, out: torch.Tensor | None = None) -> None: ...
        >>> str(schema_of(scale, writes=("out",)))
        'scale(Tensor x, float by, Tensor(a!)? out) -> ()'
    """
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    written = [p.name for p in positional if p.name in writes]
    if len(written) != len(writes):
        raise TypeError(f"[{function.__name__}] expected names of arguments, got {writes}")
    arguments = []
    for p in positional:
        kind = _kind(hints[p.name])
        if p.name in writes:
            alias = chr(ord("a") + written.index(p.name))
            kind = kind.replace("Tensor", f"Tensor({alias}!)")
        arguments.append(Argument(kind, p.name, "" if p.default is p.empty else repr(p.default)))
    return Schema(function.__name__, tuple(arguments), _results(hints["return"]))


def _kind(hint: Any) -> str:
    if hint in _KINDS:
        return _KINDS[hint]
    choices = set(get_args(hint)) - {NoneType, ...}
    if len(choices) == 1:
        (choice,) = choices
        if get_origin(hint) in (Union, UnionType):
            return f"{_kind(choice)}?"
        if get_origin(hint) in (list, tuple, Sequence):
            return f"{_kind(choice)}[]"
    raise TypeError(f"[schema] expected a type that operators take, got {hint}")


def _results(hint: Any) -> str:
    if hint is NoneType:
        return "()"
    if get_origin(hint) is tuple:
        return f"({', '.join(_result(each) for each in get_args(hint))})"
    return _result(hint)


def _result(hint: Any) -> str:
    """A result may be None; no schema says so."""
    return _kind(hint).removesuffix("?")
