"""DisableFP8GEMM: runs selected GEMMs in high precision."""

from __future__ import annotations

from typing import Any, ClassVar

from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method


@Registry.register_feature(namespace="transformer_engine")
class DisableFP8GEMM:
    """Run GEMMs in higher precision, even when FP8 autocast is enabled.

    Keys:
        gemms: fprop, dgrad, wgrad

    Example:
        example_disable_fp8_gemm:
          enabled: True
          layers:
            layer_types: [fc1]
          transformer_engine:
            DisableFP8GEMM:
              enabled: True
              gemms: [dgrad, wgrad]
    """

    CONFIG: ClassVar = FeatureConfig(
        gemms=True, aliases=("DisableFp8Gemm", "DisableQuantizationGEMM")
    )

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """False in every iteration."""
        return False, None
