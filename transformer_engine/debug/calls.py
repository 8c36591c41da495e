"""The calls that features get while a layer runs, with their documented arguments."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine.debug.names import NAMESPACE, GemmTensor
from transformer_engine.debug.plans import taken_by_kernels
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES
from transformer_engine.pytorch.tensor import Quantizer


@dataclass(eq=False)
class FeatureCalls:
    """Calls the methods of features for one tensor of a layer.

    Args:
        manager: the `DebugManager` of the session.
        layer: name of the layer.
        tensor: the tensor of the layer.
        iteration: iteration of the forward; the backward may run in a later one.
        tp_group: tensor parallel group of the layer.
        tp_size: number of ranks of `tp_group`.
        is_recompute: whether a checkpoint repeats the forward, which features have seen already.
        device: device of the layer.
        replicated: whether all ranks of `tp_group` have the same tensor.
        is_evaluation: whether the forward that runs is an evaluation, see `enter`.
    """

    manager: Any
    layer: str
    tensor: GemmTensor
    iteration: int
    tp_group: Any
    tp_size: int
    is_recompute: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    replicated: bool = False
    is_evaluation: bool = False

    def enter(self, evaluating: bool) -> None:
        """Called when a forward of the layer begins, for tensors of the forward."""
        self.is_evaluation = evaluating

    def modify(
        self,
        gemm: str,
        x: torch.Tensor,
        quantizer: Quantizer | None,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call `modify_tensor` and return its result, or `out` if the feature wrote into it.

        Args:
            gemm: the GEMM that takes the result or, if `x` is the result of a GEMM, this GEMM.
            x: the tensor in high precision.
            quantizer: the quantizer of the recipe, which the feature may use; None without FP8.
            dtype: the dtype that a plain result must have.
            out: the result of an earlier call for a cached weight, to write into.

        Raises:
            TypeError: the feature returned no tensor.
            ValueError: the result has another shape, or is on another device.
            RuntimeError: the feature got `out` and returned a tensor.
        """
        more: dict[str, Any] = {"dtype": dtype} if dtype is not None else {}
        if out is not None:
            more = {"out": out}
        made = self._call(
            "modify_tensor",
            gemm=gemm,
            tensor=x,
            default_quantizer=quantizer,
            iteration=self.iteration,
            tp_group=self.tp_group,
            tp_size=self.tp_size,
            **more,
        )
        if out is not None and made is None:
            return out
        if out is not None and self._takes_out(gemm):
            got = type(made).__name__
            raise self._error(RuntimeError, f"expected None where out is given, got {got}", gemm)
        return self._checked(made, x, gemm)

    def inspect(
        self,
        x: torch.Tensor,
        rowwise: torch.Tensor | None = None,
        columnwise: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        """Call `inspect_tensor` with `x` and the operands that were made from it."""
        self._show(
            "inspect_tensor",
            x,
            skip=taken_by_kernels,
            rowwise_quantized_tensor=rowwise,
            columnwise_quantized_tensor=columnwise,
            quantizer=quantizer,
            is_evaluation=self.is_evaluation,
        )

    def inspect_after(self, gemm: str, x: torch.Tensor, rowwise: bool) -> None:
        """Call `inspect_tensor_postquantize` with the operand of a GEMM, or its new result."""
        self._show("inspect_tensor_postquantize", x, gemm=gemm, rowwise=rowwise)

    def _show(self, call: str, x: torch.Tensor, **more: Any) -> None:
        inspector = process_state().inspector
        ended = inspector is None or inspector.manager is not self.manager
        if not (self.is_recompute or ended):
            iteration = self.manager.iteration
            if iteration != self.iteration and self._misses(call, iteration, more.get("gemm")):
                self.manager.statistics.missed(self.layer, self.tensor.name)
            more |= {"tp_group": self.tp_group, "tp_size": self.tp_size}
            self._call(call, tensor=x, iteration=iteration, **more)

    def _misses(self, call: str, iteration: int, gemm: str | None) -> bool:
        """Whether a feature that is due in the forward's iteration is not due in `iteration`."""
        target = (NAMESPACE, call, self.layer, self.tensor.name, gemm)
        now = self.manager.active(iteration, *target)
        due = self.manager.active(self.iteration, *target)
        return any(one not in now and not taken_by_kernels(one.feature) for one in due)

    def _call(self, call: str, **arguments: Any) -> Any:
        before = _writes(arguments["tensor"])
        made = self.manager.call(
            NAMESPACE, call, layer_name=self.layer, tensor_name=self.tensor.name, **arguments
        )
        if _writes(arguments["tensor"]) != before:
            text = (
                f"[{call}] expected features to leave the {self.tensor.name} as it is, got one"
                " that wrote into it: what it wrote stays in the training's own tensor"
            )
            self.manager.log_message(text, self.layer, logging.WARNING, once=(text, self.layer))
        return made

    def _takes_out(self, gemm: str) -> bool:
        """Whether the feature takes `out`; otherwise it always returns a new tensor."""
        routed = self.manager.route(NAMESPACE, self.layer, "modify_tensor", self.tensor.name, gemm)
        return any("out" in inspect.signature(r.feature.modify_tensor).parameters for r in routed)

    def _error(self, kind: type[Exception], text: str, gemm: str) -> Exception:
        where = f"layer {self.layer}, tensor {self.tensor.name}, gemm {gemm}"
        return kind(f"[modify_tensor] {text} ({where})")

    def _checked(self, made: Any, x: torch.Tensor, gemm: str) -> torch.Tensor:
        if not isinstance(made, torch.Tensor):
            text = f"expected a torch.Tensor or a QuantizedTensor, got {type(made).__name__}"
            raise self._error(TypeError, text, gemm)
        if made.shape != x.shape:
            text = f"expected a tensor of shape {tuple(x.shape)}, got {tuple(made.shape)}"
            raise self._error(ValueError, text, gemm)
        if made.device != x.device:
            text = f"expected a tensor on {x.device}, got one on {made.device}"
            raise self._error(ValueError, text, gemm)
        return made

    def check_dtype(self, made: torch.Tensor, dtype: torch.dtype, gemm: str) -> torch.Tensor:
        """Return `made`.

        Raises:
            TypeError: `made` is not a plain tensor.
            ValueError: `made` has another dtype.
        """
        if type(made) not in PLAIN_TYPES:
            text = f"expected a torch.Tensor or a QuantizedTensor, got {type(made).__name__}"
            raise self._error(TypeError, text, gemm)
        if made.dtype is not dtype:
            text = f"Dtype does not match: expected {dtype}, got {made.dtype}"
            raise self._error(ValueError, text, gemm)
        return made


def _writes(x: torch.Tensor | None) -> int | None:
    """How often a tensor was written in place; None for inference tensors, which do not count."""
    return None if x is None or x.is_inference() else x._version
