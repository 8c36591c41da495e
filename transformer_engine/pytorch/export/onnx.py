"""`onnx_export`: modules as graphs of ONNX operators, in high precision and in FP8.

While torch exports a model for ONNX, a chain does not call kernels. Instead, each stage is
expressed by torch's own operators (`Stage.exported`). A cast to FP8 becomes a pair of
QuantizeLinear and DequantizeLinear, which runtimes fuse with the GEMM that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from importlib import import_module
from typing import Any

import torch

from transformer_engine.pytorch.dtypes import TORCH_FP8
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.fp8.exporting import refuse
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor, rowwise_of

_VALUES = {  # the values of all 256 codes
    format: torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float().tolist()
    for format, dtype in TORCH_FP8.items()
}
# Zero points, whose dtype selects the float8 type. They are constants of the graph, because ONNX
# cannot compute with float8.
_ZERO = {format: torch.zeros((), dtype=dtype, device="cpu") for format, dtype in TORCH_FP8.items()}

# For the `custom_translation_table` of `torch.onnx.export`, which programs for NVIDIA's package
# pass. It is empty, because the graph has no operators that torch does not know.
te_translation_table: dict[Callable[..., Any], Callable[..., Any]] = {}


class onnx_export(ContextDecorator):
    """Let `torch.onnx.export` write modules as ONNX operators.

    The graph is that of inference. Under `fp8_autocast`, inputs and weights of GEMMs pass through
    QuantizeLinear and DequantizeLinear with float8 types (opset 19 or newer): with the trained
    scales under delayed scaling, with scales found in the graph under current scaling. Weights stay
    in their own dtype in the file. Batch and sequence may be dynamic. Nothing changes for calls
    outside `torch.onnx.export`.

    Args:
        enabled: False makes the context do nothing.

    Raises:
        RuntimeError: inside, from `torch.onnx.export`: a layer without trained scales under delayed
            scaling.
        NotImplementedError: inside, from `torch.onnx.export`: what has no ONNX form, with the layer
            (packed sequences `thd`, the KV cache, dropout in training mode, scales of blocks).

    Example:
        >>> import io, torch, transformer_engine.pytorch as te
        >>> model = te.LayerNormMLP(32, 64, device="cpu").eval()
        >>> x, batch = torch.randn(4, 32), torch.export.Dim("batch")
        >>> with te.onnx_export(enabled=True):
        ...     program = torch.onnx.export(
        ...         model, (x,), dynamic_shapes=({0: batch},), verbose=False
        ...     )
        >>> program.model.graph.outputs[0].shape[1]
        32
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(autocast_stack().exporting)
        autocast_stack().exporting = self.enabled

    def __exit__(self, *error: object) -> None:
        autocast_stack().exporting = self._before.pop()


def is_in_onnx_export_mode() -> bool:
    """Whether an enabled `onnx_export` is entered."""
    return autocast_stack().exporting


def cast_there_and_back(
    x: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype, pinned: bool = False
) -> torch.Tensor:
    """`x` as a GEMM of this quantizer sees it.

    Args:
        x: in fp32 or in the dtype of activations.
        quantizer: the quantizer of the GEMM's operand.
        dtype: the dtype of activations, to which most quantizers round first.
        pinned: `x` may come from an operator that moves elements, see `_pinned`.

    Returns:
        fp32 with an FP8 quantizer, otherwise `dtype`.
    """
    if not quantizer.rounds_once:
        x = x.to(dtype)
    elif pinned and x.dtype is torch.float32:
        x = _pinned(x)
    if not quantizer.is_fp8:
        return x
    x = x.float()
    return _quantize_dequantize(x, quantizer.exported_scale(x).reciprocal(), quantizer.format)


def dequantized_weight(
    weight: QuantizedTensor, fp8: bool, dtype: torch.dtype, layer: str
) -> torch.Tensor:
    """The values of an FP8 weight from a table, because ONNX cannot reinterpret bytes.

    For a GEMM in FP8 they are fp32, after a cast to FP8 and back that changes no value. There is
    one scale in this case, because `Float8BlockScaling` is not exported.
    """
    if weight.requires_grad:  # torch.export cannot unwrap a parameter that requires a gradient
        refuse(weight.label, "call model.requires_grad_(False) first", layer)
    matrix = rowwise_of(weight)
    assert matrix is not None
    table = torch.tensor(_VALUES[matrix.element], dtype=torch.float32, device=matrix.codes.device)
    inverse = matrix.layout.spread(matrix.scales, *matrix.codes.shape)
    if not matrix.layout.in_blocks:
        inverse = inverse.reshape(())
    values = table[matrix.codes.long()] * inverse
    return _quantize_dequantize(values, inverse, matrix.element) if fp8 else values.to(dtype)


def plain_weight(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """A weight, dequantised if it is kept in FP8, which can be joined with others."""
    if isinstance(weight, QuantizedTensor):
        return dequantized_weight(weight, False, weight.dtype, layer)
    return weight


def _symbolic(
    operator: str, inputs: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An operator of ONNX whose result has the shape of its first input."""
    ops: Any = import_module("torch.onnx.ops")
    result: torch.Tensor = ops.symbolic(operator, inputs, dtype=dtype, shape=inputs[0].shape)
    return result.to(device) if result.device != device else result  # torch makes it on the CPU


def _pinned(x: torch.Tensor) -> torch.Tensor:
    """`x` after an operator that keeps onnxruntime from moving the cast that follows.

    onnxruntime (1.31) moves a cast with a constant scale in front of Transpose and Reshape, and
    then refuses its own graph, because Transpose takes no float8 before opset 21. A Sum of one
    tensor in between prevents that.
    """
    return _symbolic("Sum", (x,), x.dtype, x.device)


def _quantize_dequantize(x: torch.Tensor, inverse: torch.Tensor, format: int) -> torch.Tensor:
    """`x` rounded to FP8.

    Both operators have a zero point: onnxruntime copies them to other places of the graph, and
    would take the codes of a DequantizeLinear without a zero point for uint8.
    """
    cpu = torch.device("cpu")  # only the second operator reads the codes
    codes = _symbolic("QuantizeLinear", (x, inverse, _ZERO[format]), TORCH_FP8[format], cpu)
    return _symbolic("DequantizeLinear", (codes, inverse, _ZERO[format]), torch.float32, x.device)
