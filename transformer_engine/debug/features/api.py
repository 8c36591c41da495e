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

    Their methods get the configuration of one tensor and gemm: `gemms` and `gemms_struct` become
    `gemm`, `tensors` and `tensors_struct` become `tensor`, and inner keys override outer ones. The
    engine does this without calling the method below, which is there for subclasses.
    """

    @parsed_by_engine
    def parse_config_and_api(
        self, config: dict[str, Any], **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a configuration covers a call, and return its entries for that call.

        Args:
            config: as written, `enabled` included.
            kwargs: `gemm_parsing` and `gemm`, `tensor_parsing` and `tensor_name`.

        Raises:
            ValueError: it names no gemms, or no tensors, though the call carries them.
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
    """The methods that layers call on features, with the results where no feature defines them.

    A feature is any class registered with `Registry.register_feature("transformer_engine")`. It
    defines any of these methods, marked with `api_method`, with any subset of the arguments.

    Routing calls, whose names end in `enabled`, return the answer for this iteration, or a pair:
    the answer, and the next iteration at which to ask again (None: never). Until then the feature
    is not called, and the answer of `fp8_gemm_enabled` stays valid.

    Their arguments:

    - `config`: the configuration of the feature for this tensor and gemm.
    - `layer_name`: of the layer.
    - `gemm`: fprop, dgrad or wgrad.
    - `tensor_name`: activation, weight, gradient, output, wgrad or dgrad.
    - `tensor`: in high precision; after a cast, what the GEMM takes.
    - `iteration`: how often `debug_api.step()` was called.
    - `default_quantizer`: casts the tensor where no feature does; None without FP8.
    - `tp_group`: tensor parallel group of the layer (not the reduction group), of `tp_size` ranks;
      for calls that carry a tensor.
    """

    def fp8_gemm_enabled(
        self, config: Config, layer_name: str, gemm: str, iteration: int
    ) -> Enabled:
        """Whether a GEMM of an FP8 recipe stays in FP8; it does if all features return True."""
        return True, None

    def modify_tensor_enabled(
        self, config: Config, layer_name: str, gemm: str, tensor_name: str, iteration: int
    ) -> Enabled:
        """Whether `modify_tensor` replaces the cast, whatever `fp8_gemm_enabled` says."""
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

        `out` is what an earlier call returned for a cached weight of fprop: write into it and
        return None.
        A plain operand must have the `dtype`. Both operands of a GEMM must be plain, or both
        `Float8Tensor`.
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
    ) -> None:
        """Look at a tensor, and at its row-wise and column-wise operands for GEMMs."""

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
        """Look at an operand after its cast or `modify_tensor`; not called where there was neither.

        `rowwise`: the operand is the row-wise one, else the column-wise one.
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
            ValueError: the call must carry more.
        """
        for name in required_kwargs.get(api_name, required_kwargs["default"]):
            if name not in kwargs:
                raise ValueError(f"[{api_name}] Cannot route API {api_name}: {name} is missing")
        return super().route_api(layer_name, api_name, **kwargs)

    def step(self) -> None:
        """Called when an iteration ends: nothing to do."""

    def end_debug(self) -> None:
        """Called when the session ends: nothing to do."""
