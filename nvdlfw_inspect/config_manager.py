"""Read access to the configuration of the running session, for programs."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect import _engine


class ConfigSpec:
    """A selection of layers.

    Example:
        >>> spec = ConfigSpec()
        >>> spec.initialize({"layer_types": ["fc1"]})
        >>> is_layer_in_cfg("decoder.1.fc1", spec)
        True
    """

    def __init__(self) -> None:
        self.layers: dict[str, Any] = {}

    def initialize(self, layers: dict[str, Any]) -> None:
        """Take the `layers` part of a section."""
        _engine.selects(layers, "")  # raises an error if it is wrong
        self.layers = dict(layers)

    def reset(self) -> None:
        """Select nothing."""
        self.layers = {}


def is_layer_in_cfg(layer_name: str, spec: ConfigSpec) -> bool:
    """Return whether the selection contains the layer."""
    return bool(spec.layers) and _engine.selects(spec.layers, layer_name)


class ConfigManager:
    """The configuration of the running session."""

    @staticmethod
    def get_config_for_layer(layer_name: str) -> dict[str, dict[str, Any]]:
        """Return {namespace: {feature: configuration}} of the sections that select the layer.

        If several sections configure the same feature for the layer, the first section counts.
        """
        from nvdlfw_inspect import api  # noqa: PLC0415 - it needs this module

        if api.DEBUG_MANAGER is None:
            return {}
        written = api.DEBUG_MANAGER.layer_config(layer_name)
        return {
            namespace: {name: {"enabled": True, **config} for name, config in features.items()}
            for namespace, features in written.items()
        }
