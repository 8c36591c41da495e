"""The namespace `base`, and how its features read their configuration."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper, parsed_by_engine
from nvdlfw_inspect.namespaces import Namespace
from nvdlfw_inspect.registry import Registry


class GenericConfigAPIMapper(BaseConfigAPIMapper):
    """Base of features whose configuration names `tensors` or has a `tensors_struct`.

    The methods of such a feature get the entries of the configuration for the tensor of the call.
    The engine selects these entries without calling `parse_config_and_api`, which is for code that
    calls the method directly.
    """

    @parsed_by_engine
    def parse_config_and_api(
        self, config: dict[str, Any], **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a configuration covers a call, and its entries for that call.

        Args:
            config: The configuration as written, including `enabled`.
            kwargs: `tensor_parsing` and `tensor_name`.

        Raises:
            ValueError: The configuration names no tensors, but the call is about one.
        """
        written = {k: v for k, v in config.items() if k != "enabled"}
        if not kwargs.get("tensor_parsing"):
            return True, written
        found = self._process_tensor_config(written, kwargs["tensor_name"])
        return found is not None, found


@Registry.register_namespace_api(namespace="base")
class GenericFrameworkAPI(Namespace):
    """`nvdlfw_inspect.api.base`, and the calls of `base` that `nvdlfw_inspect.api` has itself."""

    def __init__(self) -> None:
        super().__init__("base")

    def route_api(self, layer_name: str, api_name: str, **kwargs: Any) -> Any:
        """Call a method of the features of a layer, see `Namespace.route_api`.

        Raises:
            ValueError: `log_tensor_stats` is called without `tensor` or without `tensor_name`.
        """
        if api_name == "log_tensor_stats":
            for name in ("tensor", "tensor_name"):
                if name not in kwargs:
                    raise ValueError(f"[{api_name}] expected {name}, got none (layer {layer_name})")
        return super().route_api(layer_name, api_name, **kwargs)
