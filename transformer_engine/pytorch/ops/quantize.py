"""`Quantize`: an operation that casts a tensor, or its gradient, with the recipe of `autocast`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.export.onnx import cast_there_and_back
from transformer_engine.pytorch.fp8.autocast_stack import Step, autocast_stack
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.fp8.casts.quantizers import GemmQuantizers
from transformer_engine.pytorch.fp8.exporting import exporting, exports_inference
from transformer_engine.pytorch.fp8.recipe_quantizers import build_quantizers
from transformer_engine.pytorch.fp8.recompute_regions import Call, may_recompute
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.module.inputs import check_tensors
from transformer_engine.pytorch.module.names import layer_name
from transformer_engine.pytorch.ops.operation import FusibleOperation
from transformer_engine.pytorch.recompute.module_calls import made_in_region
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor


class _Casts(NamedTuple):
    """The casts of a call; `step` is the autocast step that ends with its backward, or None."""

    quantizers: GemmQuantizers
    step: Step | None


class Quantize(ScaledModule, FusibleOperation):
    """Casts with the recipe of the autocast that is open; outside of one it is the identity.

    In a `Sequential` the next operations read the dequantised values of the codes. Under
    `DelayedScaling` this module has a scaling state, which is saved in state dicts. Compiled code
    leaves its graph for the casts, and the result is a plain tensor of dequantised values.

    Args:
        forward: cast the tensor: the result is a `QuantizedTensor` of the recipe's kind, with
            row-wise codes, and has gradients like a plain tensor.
        backward: cast the gradient: the operation in front gets a plain tensor, rounded to FP8.
        name: for messages.

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> from transformer_engine.common.recipe import Float8CurrentScaling
    >>> with te.autocast(recipe=Float8CurrentScaling()):
    ...     codes = Quantize()(torch.tensor([[1.0, 447.0, 448.0]]))
    >>> type(codes).__name__, codes.dequantize()
    ('Float8Tensor', tensor([[  1., 448., 448.]]))
    """

    takes_quantized = True

    def __init__(
        self, forward: bool = True, backward: bool = False, *, name: str | None = None
    ) -> None:
        super().__init__(1)
        self.name = layer_name(name, type(self).__name__)
        self.casts_input = forward
        self.casts_gradient = backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cast. A tensor that is quantised already is returned as it is.

        Args:
            x: `(..., n)`, fp32, fp16 or bf16.

        Returns:
            The shape and the (nominal) dtype of `x`.

        Raises:
            TypeError: not a dense tensor.
            ValueError: no axis.
        """
        check_tensors("Quantize", self.name, x=x)
        if x.ndim == 0:
            raise ValueError(f"[Quantize] expected x of shape (..., n), got () (layer {self.name})")
        if exporting():
            return self._exported(x)
        if not torch.compiler.is_compiling():
            return self.cast(x)
        scope = autocast_stack().scope
        if not scope.active:
            return x
        if exports_inference():
            return self._cast_in_program(x) if scope.enabled else x
        from transformer_engine.pytorch.chain.outside_of_graphs import outside_of_graphs  # noqa: PLC0415

        # A quantised tensor that comes out of a graph break has no gradients in the next graph.
        return outside_of_graphs(self._cast_to_plain, x)

    def _exported(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` in an ONNX graph, which is for inference: a cast to FP8 and back."""
        if not (self.casts_input and autocast_stack().scope.enabled):
            return x
        quantizer = self._quantizers(x.device, counts=False).input
        return cast_there_and_back(x, quantizer, x.dtype).to(x.dtype)

    def _cast_in_program(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` in a program for inference: a plain result, as `strict=True` needs."""
        if isinstance(x, QuantizedTensor):
            return x.dequantize()
        quantizer = self._quantizers(x.device, counts=False).input
        if not (self.casts_input and quantizer.is_fp8):
            return x
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        codes: Any = quantizer.operands(rows, OperandRequest(quantizer, True, False)).rowwise
        return dequantize(codes.codes, codes.format, codes.scales, x.dtype).view(x.shape)

    def _cast_to_plain(self, x: torch.Tensor) -> torch.Tensor:
        made = self.cast(x)
        return made.dequantize() if isinstance(made, QuantizedTensor) else made

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Cast a tensor, which has passed the checks, in the open scope."""
        casts = self._casts(x)
        if casts is None:
            return x
        forward = self.casts_input and not isinstance(x, QuantizedTensor)
        if forward and not casts.quantizers.fp8:
            casts.quantizers.input.record_amax(x.detach().contiguous())  # if it calibrates
        return _Cast.apply(
            x,
            casts.quantizers.input.public() if forward else None,
            casts.quantizers.grad_output.public() if self.casts_gradient else None,
            casts.step,
        )

    def _casts(self, x: torch.Tensor) -> _Casts | None:
        """The casts of a call in the open scope; None in high precision."""
        stack = autocast_stack()
        recording = torch.is_grad_enabled() and x.requires_grad
        if may_recompute(stack):

            def make(counts: bool, first: Call | None) -> GemmQuantizers:
                made = self._quantizers(x.device, counts)
                return made if first is None else made.for_recompute(first.scales)

            made = made_in_region(self, recording, lambda scope: scope.active, make)
            return None if made is None else _Casts(*made)
        if not stack.scope.active:
            return None
        quantizers = self._quantizers(x.device, torch.is_grad_enabled())
        return _Casts(quantizers, self.take_backward_end() if recording else None)

    def _quantizers(self, device: torch.device, counts: bool) -> GemmQuantizers:
        stack = autocast_stack()
        built: Any = build_quantizers(self, stack.scope, counts, device)  # type: ignore[arg-type]
        if stack.scope.key >= 0:
            stack.join(self.scaling, counts)
        return built.gemms[0]

    def extra_repr(self) -> str:
        """The settings."""
        return f"forward={self.casts_input}, backward={self.casts_gradient}"


class _Cast(torch.autograd.Function):
    """Casts a tensor in the forward and its gradient in the backward; None for no cast."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, quantizer: Any, of_gradient: Any, step: Step | None
    ) -> torch.Tensor:
        ctx.call = of_gradient, step
        if quantizer is None:
            return x.view_as(x)
        quantizer.set_usage(columnwise=False)
        return quantizer.quantize(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        of_gradient, step = ctx.call
        if of_gradient is not None:
            of_gradient.set_usage(columnwise=False)
            grad = of_gradient(grad).dequantize()
        if step is not None:
            step.end_backward()
        return grad, None, None, None
