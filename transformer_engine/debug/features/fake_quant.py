"""FakeQuant: GEMMs in high precision, of tensors that are rounded to FP8 values."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nvdlfw_inspect.base import Choice, FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.configuration import MARGIN, TENSORS, Modifying, delivered
from transformer_engine.debug.mx import fake_quantize_to_mx
from transformer_engine.debug.names import OPERANDS
from transformer_engine.debug.scaling import fake_quantize
from transformer_engine.pytorch.dtypes import E4M3, E5M2

FORMATS = {"FP8E4M3": E4M3, "FP8E5M2": E5M2, "E4M3": E4M3, "E5M2": E5M2}
MX_FORMATS = {"MXFP8E4M3": E4M3, "MXFP8E5M2": E5M2}


@Registry.register_feature(namespace="transformer_engine")
class FakeQuant(Modifying):
    """Round tensors to what FP8 can hold, and run their GEMMs in high precision.

    In the formats FP8..., a tensor has one scale. It is the same on all ranks that share the
    tensor: the ranks of the layer's tensor parallel group, and of the reduction group if one was
    set. In the formats MXFP8..., every 32 consecutive values along the dimension that the GEMM sums
    over share a scale, which is a power of two. The GEMMs under `gemms` run in high precision with
    every recipe.

    Keys:
        gemms / gemms_struct: fprop, dgrad, wgrad
        tensors / tensors_struct: activation, gradient, weight, output, wgrad, dgrad
        quant_format: FP8E4M3 or FP8E5M2 (also written E4M3, E5M2), MXFP8E4M3 or MXFP8E5M2
        margin: int from -126 to 127, default 0: scale = fp8_max / (amax * 2^margin)

    Example:
        example_fake_quant_fp8:
          enabled: True
          layers:
            layer_types: [transformer_layer.layernorm_mlp.fc1]
          transformer_engine:
            FakeQuant:
              enabled: True
              quant_format: FP8E5M2
              gemms_struct:
                - gemm: fprop
                  tensors: [activation, weight]
                - gemm: dgrad
                  tensors: [gradient]
    """

    CONFIG: ClassVar = FeatureConfig(
        keys={"quant_format": Choice(*FORMATS, *MX_FORMATS, required=True), "margin": MARGIN},
        tensors=TENSORS,
        gemms=True,
        aliases=("FakeQuantFp8",),
        conflicts=("PerTensorScaling",),
    )

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """False: the other operand must be in high precision too."""
        return False, None

    @api_method
    def modify_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        tp_group: Any = None,
        tp_size: int | None = None,
    ) -> torch.Tensor | None:
        """Return the rounded tensor, or write it into `out`."""
        self.log_call(layer_name, gemm, tensor_name)
        name, margin = str(config["quant_format"]).upper(), config.get("margin") or 0
        wanted = dtype or (tensor.dtype if out is None else out.dtype)
        if name in MX_FORMATS:
            operand = OPERANDS.get(tensor_name)
            columnwise = operand is not None and operand.columnwise == gemm
            made = fake_quantize_to_mx(tensor, MX_FORMATS[name], margin, columnwise, wanted)
        else:
            x = tensor.detach().contiguous()
            largest = self.amax(x, (layer_name, gemm, tensor_name), tp_group, tp_size)
            made = fake_quantize(x, largest, FORMATS[name], margin, wanted)
        return delivered(made, out)
