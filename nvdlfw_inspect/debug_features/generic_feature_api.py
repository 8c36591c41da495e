"""How features of the namespace `base` read their configuration."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper, parsed_by_engine


class GenericConfigAPIMapper(BaseConfigAPIMapper):
    """Base of features whose configuration names `tensors` or has a `tensors_struct`.

    Their methods get what it says for the tensor of the call. The engine does the same without
    being asked; the method is for code that calls it itself.
    """

    @parsed_by_engine
    def parse_config_and_api(
        self, config: dict[str, Any], **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a configuration covers the tensor `tensor_name`, and what it says for it."""
        outer = {
            k: v for k, v in config.items() if k not in ("enabled", "tensors", "tensors_struct")
        }
        name = kwargs.get("tensor_name")
        for item in config.get("tensors_struct", ()):
            if item["tensor"] == name:
                return True, {**outer, **item}
        named = config.get("tensors", ())
        if name in ([named] if isinstance(named, str) else named):
            return True, {**outer, "tensor": name}
        return False, None
