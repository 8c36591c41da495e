"""Names the modules of a model by their attribute paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def assign_layer_names(model: Any, named: Callable[[str], None]) -> None:
    """Set `name` of every module to its attribute path, such as "model.decoder.0.fc1".

    A child of a ModuleList is named by its `layer_number` if it has one, else by its index. If two
    children of the list would get the same name, all of them are named by their indices. Modules of
    other libraries whose `name` cannot be set keep it.

    Raises:
        ValueError: `model` is no module, no wrapper with a `module`, and no list of these.
    """
    for one in model if isinstance(model, (list, tuple)) else [model]:
        _assign(_unwrap(one), "model", named)


def _unwrap(model: Any) -> Any:
    module_type = importlib.import_module("torch.nn").Module
    inner = model
    while not isinstance(inner, module_type):
        if not hasattr(inner, "module"):
            got = type(model).__name__
            raise ValueError(
                f"[infer_and_assign_layer_names] expected a torch.nn.Module or a list, got {got}"
            )
        inner = inner.module
    return inner


def _assign(module: Any, name: str, named: Callable[[str], None]) -> None:
    module_list = importlib.import_module("torch.nn").ModuleList
    if not isinstance(module, module_list):
        try:
            module.name = name
        except (AttributeError, TypeError):  # a property, or a child module
            pass
        else:
            named(name)
    children = dict(module.named_children())
    keys = _numbers(children) if isinstance(module, module_list) else list(children)
    for key, child in zip(keys, children.values(), strict=True):
        _assign(child, f"{name}.{key}", named)


def _numbers(children: dict[str, Any]) -> list[str]:
    """The last part of the name of each child of a ModuleList: `layer_number` or index."""
    numbers = [getattr(child, "layer_number", None) for child in children.values()]
    keys = [
        index if number is None else str(number)
        for index, number in zip(children, numbers, strict=True)
    ]
    return keys if len(set(keys)) == len(keys) else list(children)
