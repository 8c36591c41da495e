"""Plans for the tensors of a layer, made from the answers of features to routing calls.

A side of a tensor is one of its two operands, row-wise or column-wise. For each side, `Plan` says
whether the quantizer of the recipe or `modify_tensor` of a feature makes it, or nobody casts it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from transformer_engine.debug.names import NAMESPACE, OPERANDS, ROUTING_CALLS, TENSORS, GemmTensor
from transformer_engine.pytorch.chain.plan import CallPlan


class Plan(Enum):
    """How one side of a tensor becomes an operand of a GEMM; the debug log shows the values."""

    FP8 = "FP8 quantization"
    HIGH_PRECISION = "High precision"
    MODIFY = "modify_tensor()"


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of a layer is made and inspected. A result of a GEMM has equal sides."""

    tensor: GemmTensor
    rowwise: Plan
    columnwise: Plan
    inspect: bool
    inspect_rowwise: bool
    inspect_columnwise: bool
    statistics: tuple[Any, ...] = ()  # features that request built-in statistics of the tensor

    @property
    def modifies(self) -> bool:
        """Whether a feature replaces a side of the tensor."""
        return Plan.MODIFY in (self.rowwise, self.columnwise)

    @property
    def calls(self) -> bool:
        """Whether features are called while the layer runs."""
        return self.inspect or self.inspect_rowwise or self.inspect_columnwise or self.modifies

    def active(self, fp8: Sequence[str]) -> bool:
        """Whether anything differs from a run without the debugger; `fp8` as in `LayerPlan`."""
        if self.calls:
            return True
        sides = ((self.tensor.rowwise, self.rowwise), (self.tensor.columnwise, self.columnwise))
        return self.tensor.is_operand and any(
            gemm in fp8 and plan is Plan.HIGH_PRECISION for gemm, plan in sides
        )


@dataclass
class LayerPlan:
    """How the tensors of one layer (a GEMM triple) are made and inspected."""

    layer: str
    fp8: Sequence[str]  # the GEMMs that the recipe runs in FP8
    tensors: dict[str, TensorPlan]
    next_iteration: int | None  # the first iteration at which a decision may differ

    @property
    def active(self) -> bool:
        """Whether anything differs from a run without the debugger."""
        return any(plan.active(self.fp8) for plan in self.tensors.values())

    def lines(self) -> Iterator[tuple[str, str, Plan]]:
        """`(tensor, gemm, plan)` of every operand, in the order of the log."""
        for plan in self.tensors.values():
            if plan.tensor.columnwise is not None:
                yield plan.tensor.name, plan.tensor.rowwise, plan.rowwise
                yield plan.tensor.name, plan.tensor.columnwise, plan.columnwise


@dataclass
class Planner:
    """Asks the features of one layer in one iteration."""

    manager: Any
    layer: str
    fp8: Sequence[str]  # the GEMMs that the recipe runs in FP8
    iteration: int
    gemms_in_blocks: Sequence[str] = ()  # GEMMs whose operands have a scale for each block
    next_iteration: int | None = None  # the first iteration at which an answer may differ

    def plan(self) -> LayerPlan:
        """Ask about every tensor.

        Raises:
            ValueError: for a GEMM, a feature casts one operand with a single scale, and the recipe
                casts the other one with a scale for each block.
        """
        tensors = {tensor.name: self._tensor(tensor) for tensor in TENSORS}
        for gemm in self.gemms_in_blocks:
            self._check_scales(gemm, tensors)
        return LayerPlan(self.layer, self.fp8, tensors, self.next_iteration)

    def _tensor(self, tensor: GemmTensor) -> TensorPlan:
        looking = self._routed("inspect_tensor_enabled", tensor)
        statistics = tuple(routed for routed in looking if _has(routed, "built_in_statistics"))
        called = not all(taken_by_kernels(routed.feature) for routed in looking)
        inspect = called and self._ask("inspect_tensor_enabled", tensor) and self._calls_for(tensor)
        gemms = [g for g in (tensor.rowwise, tensor.columnwise) if g is not None]
        ask_after = partial(self._ask, "inspect_tensor_postquantize_enabled", tensor)
        if tensor.is_operand:
            after = [ask_after(gemm) for gemm in gemms]
            plans = [self._side(tensor, gemm) for gemm in gemms]
        else:
            plans = [self._side(tensor, gemm) for gemm in gemms]
            after = [p is Plan.MODIFY and ask_after(g) for p, g in zip(plans, gemms, strict=True)]
        # A side in high precision is the tensor itself, which `inspect_tensor` shows.
        after = [a and p is not Plan.HIGH_PRECISION for a, p in zip(after, plans, strict=True)]
        return TensorPlan(tensor, plans[0], plans[-1], inspect, after[0], after[-1], statistics)

    def _calls_for(self, tensor: GemmTensor) -> bool:
        """Whether a feature that answered yes must be called, because kernels do not serve it."""
        target = (self.layer, tensor.name, None)
        active = self.manager.active(self.iteration, NAMESPACE, "inspect_tensor", *target)
        return not all(taken_by_kernels(routed.feature) for routed in active)

    def _side(self, tensor: GemmTensor, gemm: str) -> Plan:
        modify = self._ask("modify_tensor_enabled", tensor, gemm)
        if modify and not self._makes_fp8(tensor, gemm):
            return Plan.MODIFY
        if not (tensor.is_operand and gemm in self.fp8):
            if modify:
                self._warn(tensor, gemm, "the recipe runs this GEMM in high precision")
            return Plan.HIGH_PRECISION
        if self._ask("fp8_gemm_enabled", None, gemm):
            return Plan.MODIFY if modify else Plan.FP8
        if modify:
            self._warn(tensor, gemm, "another feature runs this GEMM in high precision")
        return Plan.HIGH_PRECISION

    def _ask(self, call: str, tensor: GemmTensor | None, gemm: str | None = None) -> bool:
        names: dict[str, Any] = {} if tensor is None else {"tensor_name": tensor.name}
        if gemm is not None:
            names["gemm"] = gemm
        answer, following = self.manager.decide(
            NAMESPACE, call, layer_name=self.layer, iteration=self.iteration, **names
        )
        if answer and call != "fp8_gemm_enabled":  # True is valid for this iteration alone
            following = self.iteration + 1
        known = self.next_iteration
        if following is not None:
            self.next_iteration = following if known is None else min(known, following)
        return bool(answer)

    def _routed(self, call: str, tensor: GemmTensor, gemm: str | None = None) -> tuple[Any, ...]:
        return self.manager.route(NAMESPACE, self.layer, call, tensor.name, gemm)

    def _makes_fp8(self, tensor: GemmTensor, gemm: str) -> bool:
        """Whether a feature that modifies the tensor returns FP8, which needs an FP8 GEMM."""
        return any(
            _has(r, "makes_fp8") for r in self._routed("modify_tensor_enabled", tensor, gemm)
        )

    def _check_scales(self, gemm: str, plans: Mapping[str, TensorPlan]) -> None:
        """Refuse a GEMM of an operand with a single scale and one with block scales."""
        sides = {
            tensor: plans[tensor.name].rowwise
            if tensor.rowwise == gemm
            else plans[tensor.name].columnwise
            for tensor in OPERANDS.values()
            if gemm in (tensor.rowwise, tensor.columnwise)
        }
        scaled = [
            tensor
            for tensor, plan in sides.items()
            if plan is Plan.MODIFY and self._makes_fp8(tensor, gemm)
        ]
        others = [tensor.name for tensor, plan in sides.items() if plan is Plan.FP8]
        if scaled and others:
            feature = self._routed("modify_tensor_enabled", scaled[0], gemm)[0].name
            raise ValueError(
                f"[{feature}] expected both operands of {gemm} or neither, because the recipe"
                f" scales them in blocks, got {scaled[0].name} alone: add {others[0]} to tensors,"
                f" or leave {gemm} out of gemms (layer {self.layer})"
            )

    def _warn(self, tensor: GemmTensor, gemm: str, why: str) -> None:
        feature = self._routed("modify_tensor_enabled", tensor, gemm)[0].name
        layer = self.layer
        text = f"{feature} leaves {tensor.name}, gemm {gemm} as it is: {why}"
        key = ("unused", layer, tensor.name, gemm, feature)
        self.manager.log_message(text, layer, level=logging.WARNING, once=key)


def taken_by_kernels(feature: Any) -> bool:
    """Whether a feature only requests built-in statistics: kernels take them without calling it.

    A subclass that overrides `inspect_tensor` or `inspect_tensor_enabled` is called.
    """
    kind = type(feature)
    built_in = next((c for c in kind.__mro__ if "built_in_statistics" in vars(c)), None)
    calls = ("inspect_tensor", "inspect_tensor_enabled")
    return built_in is not None and all(
        getattr(kind, call) is getattr(built_in, call) for call in calls
    )


def _has(routed: Any, attribute: str) -> bool:
    return bool(getattr(routed.feature, attribute, False))


def feature_that_needs_python(manager: Any, layer: str, by_kernels: bool) -> str | None:
    """Return the name of a feature of the layer that a compiled or captured graph cannot call.

    With `by_kernels`, features that only request built-in statistics do not count.
    """
    for tensor in TENSORS:
        for gemm in (tensor.rowwise, tensor.columnwise):
            for call in ROUTING_CALLS:
                about = None if call == "fp8_gemm_enabled" else tensor.name
                for routed in manager.route(NAMESPACE, layer, call, about, gemm):
                    taken = call == "inspect_tensor_enabled" and taken_by_kernels(routed.feature)
                    if not (by_kernels and taken):
                        return str(routed.name)
    return None


def gemms_in_blocks(call: CallPlan) -> list[list[str]]:
    """For each Matmul of a call, the GEMMs whose operands have a scale for each block."""
    found = []
    for step, own in zip(call.chain.steps, call.stage_plans, strict=True):
        if step.stage.multiplies:
            runs = {"fprop": True, "dgrad": own.needs_input, "wgrad": own.needs_weight}
            in_blocks = own.fp8 and own.quantizers.input.layout.in_blocks
            found.append([gemm for gemm, needed in runs.items() if needed and in_blocks])
    return found
