"""`CallPlan`: what is decided once for all calls of a chain that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.pytorch._torch_private import allows_tf32

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.quantizers import GemmQuantizers


class CallPlan:
    """The facts of a call of a chain. They seldom change, so modules keep their plans.

    Args:
        dtype: of activations.
        needs: whether a gradient is wanted, of each value that comes in and of each parameter.
        quantizers: of each Matmul in order.
        first_microbatch: the caller's `is_first_microbatch`.

    Attributes:
        requires_grad: autograd will call backward.
        in_first_forward: autograd does not see this call, and will see one that computes the same
            again. Its stages do all that they would do otherwise, so that no bit differs.
        is_recompute: this call computes one again (see `recompute`).
        recompute_plan: of calls that compute those of this plan again.
        recompute_scales: where such a plan finds the scales of the call that it computes again.
        columns: of the module's scaling state that it casts with.
        options: what else stages must know of it.
        fp8_weights: which inputs are weights that exist in FP8 alone.
        caching: the stages that read what they have cached, with their plans.
        operator: the key of the operator that the call is in compiled code; else empty.
        apart: a tensor of no values that the kernels of forward take, so that a compiler does not
            take them for those of an equal call; None: it may.
        state: of such a plan: the memory of scaling state, or stand-ins for it.
        bind: makes the same plan with other state than these stand-ins.
        stage_plans: of each stage.
        differentiable: of each stage, whether anything in it needs a gradient.
        recordings: by shapes of the inputs; None where calls are not recorded.
        recorded: the forward of this call ran from a recording, or from those of all segments that
            can be recorded.
        inspect_at: the tick of the inspector from which it may want to look.
        inspection: what it decided last.
    """

    __slots__ = (
        "accumulates",
        "apart",
        "bind",
        "caching",
        "chain",
        "columns",
        "compiling",
        "differentiable",
        "dtype",
        "exporting",
        "first_microbatch",
        "fp8_weights",
        "in_first_forward",
        "inspect_at",
        "inspection",
        "is_recompute",
        "needs",
        "operator",
        "options",
        "quantizers",
        "recompute_plan",
        "recompute_scales",
        "recorded",
        "recordings",
        "requires_grad",
        "stage_plans",
        "state",
    )

    def __init__(
        self,
        dtype: torch.dtype,
        needs: tuple[bool, ...],
        quantizers: Sequence[GemmQuantizers] = (),
        first_microbatch: bool | None = None,
    ) -> None:
        self.dtype = dtype
        self.needs = needs
        self.quantizers = quantizers
        self.first_microbatch = first_microbatch
        self.requires_grad = any(needs)
        self.accumulates = False  # weight gradients go into `main_grad`
        self.in_first_forward = self.is_recompute = self.recorded = False
        self.recompute_plan: CallPlan | None = None
        self.recompute_scales: torch.Tensor | None = None
        self.columns: Any = None
        self.options: Any = None
        self.chain: Any = None  # that prepared it
        self.stage_plans: Sequence[Any] = ()
        self.differentiable: Sequence[bool] = ()
        self.compiling = False
        self.exporting = False  # to ONNX
        self.fp8_weights: tuple[int, ...] = ()
        self.caching: Sequence[Any] = ()
        self.inspect_at = 0
        self.inspection: Any = None
        self.recordings: dict[Any, Any] | None = None
        self.state: Any = None
        self.bind: Any = None
        self.operator: str = ""
        self.apart: torch.Tensor | None = None

    @property
    def in_tf32(self) -> bool:
        """Whether products of fp32 operands run in TF32 now, which a recording cannot change."""
        return self.dtype is torch.float32 and allows_tf32()

    def bound(self, state: Any) -> CallPlan:
        """The plan with these tensors in place of its stand-ins."""
        return self if self.bind is None else self.bind(state)

    def copy(self) -> CallPlan:
        """The same plan, for one call that has to be told from others."""
        own = CallPlan.__new__(CallPlan)
        for name in CallPlan.__slots__:
            setattr(own, name, getattr(self, name))
        own.recorded = False
        return own


def needs_of(input_needs: bool, parameters: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
    """`CallPlan.needs` of a chain of one value, where autograd records."""
    return (input_needs, *[p is not None and p.requires_grad for p in parameters])


class PlanCache(dict[Any, CallPlan]):
    """The plans of one module, which point into its scaling state: copies of it are empty.

    `torch.nn.utils.parametrize` copies attributes of modules one by one.
    """

    def __deepcopy__(self, memo: object) -> PlanCache:
        return PlanCache()

    def __reduce__(self) -> tuple[type[PlanCache], tuple[()]]:
        return PlanCache, ()
