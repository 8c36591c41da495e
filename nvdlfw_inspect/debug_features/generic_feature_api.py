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
        """Say whether a configuration covers a call, and what it says for it.

        Args:
            config: As written, `enabled` included.
            kwargs: `tensor_parsing` and `tensor_name`.

        Raises:
            ValueError: It names no tensors, though the call carries one.
        """
        written = {k: v for k, v in config.items() if k != "enabled"}
        if not kwargs.get("tensor_parsing"):
            return True, written
        found = self._process_tensor_config(written, kwargs["tensor_name"])
        return found is not None, found
