"""PerTensorScaling: current scaling for selected operands, whatever the FP8 recipe."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features import configuration
from transformer_engine.debug.features.configuration import Modifying, delivered
from transformer_engine.debug.names import OPERANDS
from transformer_engine.debug.scaling import cast


@Registry.register_feature(namespace="transformer_engine")
class PerTensorScaling(Modifying):
    """Cast operands to FP8 with a scale from the amax of the tensor itself (current scaling).

    The FP8 format is that of the recipe. Under block scaling, select both operands of a GEMM or
    none of them: cuBLASLt cannot multiply an operand that has one scale by an operand that has a
    scale for each block. A GEMM that runs in high precision, because of the recipe or of another
    feature, stays in high precision: a warning in the log says that its operands are not cast.
    Ranks that share a tensor (the ranks of the layer's tensor parallel group, and of the reduction
    group if one was set) use the same scale, from the amax over all of them.

    Keys:
        gemms / gemms_struct: fprop, dgrad, wgrad
        tensors / tensors_struct: activation, gradient, weight
        margin: int from -126 to 127, default 0: scale = fp8_max / (amax * 2^margin)

    Example:
        example_per_tensor_scaling:
          enabled: True
          layers:
            layer_types: [transformer_layer.self_attention.layernorm_q]
          transformer_engine:
            PerTensorScaling:
              enabled: True
              margin: 1
              gemms: [dgrad]
              tensors: [weight, gradient]
    """

    CONFIG: ClassVar = FeatureConfig(
        keys={"margin": configuration.MARGIN},
        tensors=configuration.OPERANDS,
        gemms=True,
        conflicts=("FakeQuant",),
    )
    makes_fp8 = True

    @api_method
    def modify_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int,
        default_quantizer: Any,
        out: torch.Tensor | None = None,
        tp_group: Any = None,
        tp_size: int | None = None,
    ) -> torch.Tensor | None:
        """Return the cast tensor, or write it into `out`.

        Raises:
            ValueError: there is no FP8 recipe, which would say to which format to cast.
        """
        if default_quantizer is None:
            raise ValueError(
                "[PerTensorScaling] expected a quantizer of an FP8 recipe, got none: there is no"
                " format to cast to"
            )
        self.log_call(layer_name, gemm, tensor_name)
        columnwise = OPERANDS[tensor_name].columnwise == gemm
        x = tensor.detach().contiguous()
        largest = self.amax(x, (layer_name, gemm, tensor_name), tp_group, tp_size)
        margin = config.get("margin") or 0
        made = cast(x, largest, int(default_quantizer.dtype), margin, columnwise)
        return delivered(made, out)
