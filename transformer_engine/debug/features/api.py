"""The methods that layers call on features, and `api.transformer_engine`, which calls them too."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

from nvdlfw_inspect.base import BaseConfigAPIMapper, choose_entry, parsed_by_engine
from nvdlfw_inspect.namespaces import Namespace
from nvdlfw_inspect.registry import Registry
from transformer_engine.debug.names import NAMESPACE
from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer

Config: TypeAlias = dict[str, Any]
Enabled: TypeAlias = bool | tuple[bool, int | None]

required_kwargs = {
    "fp8_gemm_enabled": ["gemm"],
    "modify_tensor_enabled": ["tensor_name", "gemm"],
    "modify_tensor": ["tensor_name", "gemm"],
    "inspect_tensor_enabled": ["tensor_name"],
    "inspect_tensor": ["tensor_name"],
    "inspect_tensor_postquantize_enabled": ["tensor_name"],
    "inspect_tensor_postquantize": ["tensor_name"],
    "default": ["tensor_name", "gemm"],
}
"""The arguments that each call needs beside the name of the layer."""


class TEConfigAPIMapper(BaseConfigAPIMapper):
    """Base of features whose configuration names `gemms` and `tensors`.

    The methods of such a feature get the configuration of one tensor and gemm: `gemms` and
    `gemms_struct` become `gemm`, `tensors` and `tensors_struct` become `tensor`, and inner keys
    override outer ones. The engine does this itself, without `parse_config_and_api`, which is there
    for subclasses.
    """

    @parsed_by_engine
    def parse_config_and_api(
        self, config: dict[str, Any], **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a configuration covers a call, and return its entries for that call.

        Args:
            config: the configuration as written, including `enabled`.
            kwargs: `gemm_parsing` and `gemm`, `tensor_parsing` and `tensor_name`.

        Raises:
            ValueError: the configuration names no gemms, or no tensors, but the call is about one.
        """
        found: dict[str, Any] | None = {k: v for k, v in config.items() if k != "enabled"}
        if not config.get("enabled", True):
            return False, None
        if kwargs.get("gemm_parsing") and found is not None:
            found = choose_entry(found, "gemm", kwargs.get("gemm"))
        if kwargs.get("tensor_parsing") and found is not None:
            found = choose_entry(found, "tensor", kwargs.get("tensor_name"))
        return found is not None, found


class TEDefaultFeatures(Protocol):
    """The methods that layers call on features, with the results if no feature defines them.

    A feature is any class registered with `Registry.register_feature("transformer_engine")`. It
    defines any of these methods, marked with `api_method`, with any subset of the arguments.

    Routing calls, whose names end in `enabled`, return the answer for this iteration, or a pair:
    the answer, and the next iteration at which to ask again (None: never). Until that iteration the
    feature is not called, and the answer of `fp8_gemm_enabled` stays valid.

    Arguments of these methods:

    - `config`: the configuration of the feature for this tensor and gemm.
    - `layer_name`: name of the layer.
    - `gemm`: fprop, dgrad or wgrad.
    - `tensor_name`: activation, weight, gradient, output, wgrad or dgrad.
    - `tensor`: the tensor in high precision; in `inspect_tensor_postquantize`, the operand of the
      GEMM or its modified result.
    - `iteration`: the current iteration, which `debug_api.step()` increases by one.
    - `default_quantizer`: the quantizer of the recipe, which casts the tensor if no feature does;
      None without FP8.
    - `tp_group`: tensor parallel group of the layer (not the reduction group), of `tp_size` ranks;
      only in calls that have a `tensor`.
    """

    def fp8_gemm_enabled(
        self, config: Config, layer_name: str, gemm: str, iteration: int
    ) -> Enabled:
        """Whether a GEMM runs in FP8, as the recipe says; it does if all features return True."""
        return True, None

    def modify_tensor_enabled(
        self, config: Config, layer_name: str, gemm: str, tensor_name: str, iteration: int
    ) -> Enabled:
        """Whether `modify_tensor` replaces the cast, regardless of `fp8_gemm_enabled`."""
        return False, None

    def modify_tensor(
        self,
        config: Config,
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        default_quantizer: Quantizer | None,
        iteration: int,
        out: torch.Tensor | QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | QuantizedTensor | None:
        """Return a tensor of the same shape: the operand for the GEMM, or its new result.

        If `out` is given, it is the result of an earlier call for a weight of fprop that is cached:
        write into `out` and return None. An operand that is a plain tensor must have the dtype
        `dtype`. The two operands of a GEMM must both be plain tensors, or both `Float8Tensor`.
        """
        raise NotImplementedError("[modify_tensor] expected a feature that defines it, got none")

    def inspect_tensor_enabled(
        self, config: Config, layer_name: str, tensor_name: str, iteration: int
    ) -> Enabled:
        """Whether `inspect_tensor` is called."""
        return False, None

    def inspect_tensor(
        self,
        config: Config,
        layer_name: str,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int,
        tp_group: Any = None,
        tp_size: int = 1,
        rowwise_quantized_tensor: torch.Tensor | None = None,
        columnwise_quantized_tensor: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
        is_evaluation: bool = False,
    ) -> None:
        """Look at a tensor, and at its row-wise and column-wise operands for GEMMs.

        `is_evaluation` says whether the layer is in `eval()` and autograd does not record the call.
        """

    def inspect_tensor_postquantize_enabled(
        self, config: Config, layer_name: str, gemm: str, tensor_name: str, iteration: int
    ) -> Enabled:
        """Whether `inspect_tensor_postquantize` is called."""
        return False, None

    def inspect_tensor_postquantize(
        self,
        config: Config,
        layer_name: str,
        tensor_name: str,
        gemm: str,
        tensor: torch.Tensor,
        iteration: int,
        tp_group: Any = None,
        tp_size: int = 1,
        rowwise: bool = True,
    ) -> None:
        """Look at an operand after its cast or `modify_tensor`; not called if there was neither.

        `rowwise` says whether it is the row-wise operand or the column-wise one.
        """


@Registry.register_namespace_api(namespace=NAMESPACE)
class TransformerEngineAPI(Namespace):
    """`nvdlfw_inspect.api.transformer_engine`, by which programs call features as layers do."""

    documented_calls = frozenset(required_kwargs) - {"default"}

    def __init__(self) -> None:
        super().__init__(NAMESPACE)

    def route_api(self, layer_name: str, api_name: str, **kwargs: Any) -> Any:
        """Make a call as a layer would.

        Raises:
            RuntimeError: no session is running.
            ValueError: a required argument of the call is missing.
        """
        for name in required_kwargs.get(api_name, required_kwargs["default"]):
            if name not in kwargs:
                raise ValueError(f"[{api_name}] Cannot route API {api_name}: {name} is missing")
        return super().route_api(layer_name, api_name, **kwargs)
