"""DisableFP8Layer: runs all GEMMs of a layer in high precision."""

from __future__ import annotations

from typing import Any, ClassVar

from nvdlfw_inspect import api
from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method


@Registry.register_feature(namespace="transformer_engine")
class DisableFP8Layer:
    """Run all GEMMs of a layer in higher precision, even when FP8 autocast is enabled.

    Example:
        example_disable_fp8_layer:
          enabled: True
          layers:
            layer_types: [fc1]
          transformer_engine:
            DisableFP8Layer:
              enabled: True
    """

    CONFIG: ClassVar = FeatureConfig(aliases=("DisableFp8Layer", "DisableQuantizationLayer"))

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """False in every iteration."""
        if api.DEBUG_MANAGER is not None:
            key = ("FP8 Disabled", layer_name)
            api.DEBUG_MANAGER.log_message("FP8 Disabled", layer_name, once=key)
        return False, None
