"""Checks of the arguments that constructors of modules share."""

from __future__ import annotations

import inspect
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.parallel.construction import unexpected_keywords
from transformer_engine.pytorch.parallel.groups import TensorParallel


def check_sizes(module: str, layer: str | None, least: int = 1, /, **sizes: Any) -> None:
    """Raise unless every argument is an int of at least `least`; bools are refused."""
    for name, size in sizes.items():
        try:
            if isinstance(size, bool):
                raise TypeError
            small = operator.index(size) < least
        except TypeError as error:
            raise TypeError(
                f"[{module}] expected {name} to be an int, got {size!r}{in_layer(layer)}"
            ) from error
        if small:
            raise ValueError(f"[{module}] expected {name} >= {least}, got {size}{in_layer(layer)}")


def list_of_ints(module: str, layer: str | None, /, **values: Any) -> list[int]:
    """The one argument, a tensor or a sequence, as a list of ints.

    Symbolic sizes of compiled code stay symbols. Raise TypeError unless all are ints.
    """
    ((name, many),) = values.items()
    try:
        found = list(many.tolist() if hasattr(many, "tolist") else many)
        if any([isinstance(one, bool) for one in found]):
            raise TypeError
        return [one if isinstance(one, int) else operator.index(one) for one in found]
    except (NotImplementedError, TypeError) as error:  # the first of a tensor on meta
        raise TypeError(
            f"[{module}] expected {name} to be ints, got {many}{in_layer(layer)}"
        ) from error


def check_numbers(module: str, layer: str | None, /, **values: Any) -> None:
    """Raise TypeError unless every argument is a real number."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"[{module}] expected {name} to be a number, got {value!r}{in_layer(layer)}"
            )


def check_dtypes(module: str, layer: str | None, /, **dtypes: Any) -> None:
    """Raise TypeError unless every argument is a dtype of high precision."""
    for name, dtype in dtypes.items():
        if dtype not in HIGH_PRECISION:
            raise TypeError(
                f"[{module}] expected {name} torch.float32, torch.float16 or torch.bfloat16, got"
                f" {dtype!r}{in_layer(layer)}"
            )


def refuse_others(
    op: str, layer: str | None, values: Mapping[str, Any], only: Mapping[str, Any]
) -> None:
    """Raise NotImplementedError for a value that differs from the one of its name in `only`."""
    for name, value in values.items():
        if name in only and value is not only[name] and (only[name] is None or value != only[name]):
            raise NotImplementedError(
                f"[{op}] expected {name}={only[name]!r}, the only value that is implemented, got"
                f" {value!r}{in_layer(layer)}"
            )


def in_layer(layer: str | None) -> str:
    """The end of a message: the layer, if it has a name."""
    return f" (layer {layer})" if layer else ""


def refuse_keywords(
    module: Callable[..., Any], unknown: Iterable[str], further: Iterable[str] = ()
) -> NoReturn:
    """Raise TypeError for unknown keywords of a constructor or method, with the nearest known one.

    `module` is the class or the method; `further` keywords are known beside its parameters.
    """
    name, known = module.__qualname__, [*inspect.signature(module).parameters]
    if isinstance(module, type):  # a subclass may hand on what it does not name
        name, known = module.__name__, []
        for kind in module.__mro__:
            known += inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    named = [one for one in known if one not in ("self", "args", "kwargs", "others")]
    raise TypeError(unexpected_keywords(name, unknown, [*named, *further]))


def check_keywords(
    method: Callable[..., Any], keywords: Iterable[str], known: Iterable[str]
) -> None:
    """Raise TypeError unless all of a call's further keywords are known."""
    if any([name not in known for name in keywords]):
        refuse_keywords(method, {*keywords} - {*known}, known)


def tensor_parallel(
    module: Any, tp_group: Any, tp_size: int, sequence_parallel: bool, shared: bool = True
) -> TensorParallel:
    """The tensor parallel ranks of a module; this rank alone unless `shared`.

    Raises:
        TypeError: not a process group, or sizes that are not ints.
        ValueError: a group whose size is not `tp_size`.
    """
    kind = type(module).__name__
    check_sizes(kind, str(module.name), 1, tp_size=tp_size)
    ranks = TensorParallel(kind, module.name, tp_group, tp_size, sequence_parallel)
    return ranks if shared else TensorParallel(kind, module.name, None, 1)
