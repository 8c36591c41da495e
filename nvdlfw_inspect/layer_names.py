"""Names layers by their place in a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def assign_layer_names(model: Any, named: Callable[[str], None]) -> None:
    """Set `name` on every module: "model", a dot, and its attribute path.

    Inside a ModuleList, a child's `layer_number` stands for its index, if it has one.

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
        module.name = name
        named(name)
    for attribute, child in module.named_children():
        key = attribute
        if isinstance(module, module_list):
            key = str(getattr(child, "layer_number", attribute))
        _assign(child, f"{name}.{key}", named)
