"""TestDummyFeature: counts calls, which shows whether a layer has left the debugger."""

from __future__ import annotations

from typing import Any, ClassVar

from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method

_inspect_tensor_enabled_call_count = 0
_inspect_tensor_call_count = 0


@Registry.register_feature(namespace="transformer_engine")
class TestDummyFeature:
    """Count calls in `transformer_engine.debug.features._test_dummy_feature`.

    Keys:
        inspect_only_once: True to answer that nothing is ever to be inspected
        tensors / tensors_struct: activation, gradient, weight, output, wgrad, dgrad
        gemms / gemms_struct: fprop, dgrad, wgrad
    """

    __test__ = False  # no test for pytest to collect
    CONFIG: ClassVar = FeatureConfig(
        keys={"inspect_only_once": "bool"},
        tensors=("activation", "gradient", "weight", "output", "wgrad", "dgrad"),
        gemms=True,
    )

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], *args: Any, **kwargs: Any
    ) -> bool | tuple[bool, int | None]:
        """Count; no for good with `inspect_only_once`, else yes for this iteration."""
        global _inspect_tensor_enabled_call_count  # noqa: PLW0603 - the count is the feature
        _inspect_tensor_enabled_call_count += 1
        return (False, None) if config.get("inspect_only_once") else True

    @api_method
    def inspect_tensor(self, config: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Count."""
        global _inspect_tensor_call_count  # noqa: PLW0603 - the count is the feature
        _inspect_tensor_call_count += 1
