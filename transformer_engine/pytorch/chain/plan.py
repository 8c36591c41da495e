"""`CallPlan`: what is decided once for all calls of a chain with equal facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.pytorch._torch_private import allows_tf32, graph_task

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.casts.quantizers import GemmQuantizers


# A recording takes the host as long as several calls. So where calls may run differently, it is
# made when a shape is called again, except for the first shapes.
_AT_ONCE = 8
_CALLS_TO_ADD, _CALLS_TO_REPLACE = 2, 8
_MOST_COUNTED = 256


class Recordings(dict[Any, Any]):
    """The `Segments` of the calls of a plan, or of the joined plans of a layer, by their shapes."""

    _of_recomputes: Recordings | None = None

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[Any, int] = {}  # of shapes that are not recorded

    def admits(self, key: Any, most: int, differs: bool) -> bool:
        """Whether a call with this new shape is recorded; `most` shapes may be.

        `differs`: equal calls may run differently, see `CallPlan.may_run_differently`. Then a shape
        that is often called takes the place of the oldest one.
        """
        if self is CLOSED:
            return False
        has_room = len(self) < most
        if has_room and not (differs and len(self) >= _AT_ONCE):
            return True
        if not (differs and self):
            return False
        calls = self._calls.get(key, 0) + 1
        if calls < (_CALLS_TO_ADD if has_room else _CALLS_TO_REPLACE):
            if len(self._calls) >= _MOST_COUNTED:
                self._calls.clear()
            self._calls[key] = calls
            return False
        self._calls.pop(key, None)
        if not has_room:
            self.pop(next(iter(self)), None)
        return True

    def of_recompute(self, admitted: bool) -> Recordings:
        """The table for the recompute of a call, whose shape was `admitted` to this one or not.

        It has room for all shapes that are admitted here.
        """
        if not admitted:
            return CLOSED
        if self._of_recomputes is None:
            self._of_recomputes = Recordings()
        return self._of_recomputes


CLOSED = Recordings()  # of calls that are never recorded: it admits no shape


class CallPlan:
    """The facts of a call of a chain. They seldom change, so modules cache their plans.

    Args:
        dtype: dtype of activations.
        needs: for each value that comes in, then for each parameter: whether its gradient is
            wanted.
        quantizers: the quantizers of each Matmul, in order.
        first_microbatch: the caller's `is_first_microbatch`.

    Attributes:
        requires_grad: autograd will call backward.
        counts: gradients are enabled, so with delayed scaling the casts leave amaxes; also if
            autograd records nothing, because all that the call reads is frozen.
        accumulates: some weight gradients go into `main_grad`.
        in_first_forward: the first forward of a recompute region, which autograd does not record.
            Its stages compute what they would if autograd recorded the call, so that both forwards
            are equal bit for bit.
        is_recompute: the call is the recompute of an earlier one (see `recompute`).
        recompute_plan: the plan of the recomputes of this plan's calls.
        recompute_scales: in the plan of recomputes, memory for the scales of the first forward.
        columns: the columns of the module's scaling state with the scales of its casts.
        options: further settings that stages of this chain read.
        members: in a joined plan, the plans of its parts, and other facts of the call; else empty.
        fp8_weights: numbers of the inputs that are weights kept in FP8.
        caching: the stages that read tensors which earlier calls have cached, with their plans.
        cached: by stage, the weights that a call which may run again has cached or read; in a
            recompute, those of its first forward.
        dropping: the stages that drop what they have cached: it is of an earlier step.
        operator: the key of the operator that runs the call in compiled code; else empty.
        facts: in the plan of an operator, the elements of `PartFacts`; else None.
        cse_barrier: an empty tensor that kernels of the forward take as an argument, so that a
            compiler does not merge them with equal kernels of another call; None if it may.
        state: in the plan of an operator, the memory of scaling state, or stand-ins for it.
        bind: a function that makes the same plan with other scaling state in place of the
            stand-ins; or None.
        stage_plans: the plan of each stage.
        differentiable: for each stage, whether it has a gradient to compute.
        recordings: `Recordings`; None if calls are not recorded.
        joins: collectives may be recorded together with the stages around them; False once such a
            recording was refused.
        by_stages: the first steps of the segments that this call must run stage by stage.
        admitted: the shapes of the last forward are in `recordings`.
        unrecorded: the first steps of the segments that ran stage by stage in the last forward;
            None if the chain ran without segments.
        inspect_at: the tick of the inspector from which on it may inspect the call.
        inspection: the last decision of the inspector.
    """

    __slots__ = (
        "accumulates",
        "admitted",
        "bind",
        "by_stages",
        "cached",
        "caching",
        "chain",
        "columns",
        "compiling",
        "counts",
        "cse_barrier",
        "differentiable",
        "dropping",
        "dtype",
        "exporting",
        "facts",
        "first_microbatch",
        "fp8_weights",
        "in_first_forward",
        "inspect_at",
        "inspection",
        "is_recompute",
        "joins",
        "members",
        "needs",
        "operator",
        "options",
        "quantizers",
        "recompute_plan",
        "recompute_scales",
        "recordings",
        "requires_grad",
        "stage_plans",
        "state",
        "unrecorded",
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
        self.requires_grad = self.counts = any(needs)
        self.accumulates = False  # weight gradients go into `main_grad`
        self.in_first_forward = self.is_recompute = False
        self.by_stages: tuple[int, ...] = ()
        self.unrecorded: tuple[int, ...] | None = None
        self.admitted = False
        self.recompute_plan: CallPlan | None = None
        self.recompute_scales: torch.Tensor | None = None
        self.columns: Any = None
        self.options: Any = None
        self.chain: Any = None  # the chain that prepared the plan
        self.stage_plans: Sequence[Any] = ()
        self.differentiable: Sequence[bool] = ()
        self.compiling = False
        self.exporting = False  # to ONNX
        self.fp8_weights: tuple[int, ...] = ()
        self.caching: Sequence[Any] = ()
        self.cached: Mapping[Any, Any] = {}
        self.dropping: Sequence[Any] = ()
        self.inspect_at = 0
        self.inspection: Any = None
        self.recordings: Recordings | None = None
        self.members: tuple[Any, ...] = ()
        self.joins = True
        self.state: Any = None
        self.bind: Any = None
        self.operator: str = ""
        self.facts: tuple[Any, ...] | None = None
        self.cse_barrier: torch.Tensor | None = None

    @property
    def in_tf32(self) -> bool:
        """Whether fp32 GEMMs run in TF32 now. A recording keeps the setting of its first call."""
        return self.dtype is torch.float32 and allows_tf32()

    @property
    def may_run_differently(self) -> bool:
        """No recompute and no compiled code expects that all calls run from recordings, or none.

        A checkpoint of torch may recompute the call of a module that needs gradients, but it runs
        no layer as one chain.
        """
        first = self.in_first_forward or self.is_recompute
        return bool(self.members) or not (first or self.requires_grad or self.bind is not None)

    def drop_caches(self) -> None:
        """Drop what earlier steps have cached; the recompute of a checkpoint begins no step."""
        if self.compiling or graph_task() == -1:
            for stage in self.dropping:
                stage.cached_weight = None

    def bound(self, state: Any) -> CallPlan:
        """The plan with this scaling state in place of its stand-ins."""
        return self if self.bind is None else self.bind(state)

    def with_quantizers(self, quantizers: Sequence[GemmQuantizers]) -> CallPlan:
        """A plan of the same calls with other casts, which no chain has prepared yet."""
        own = CallPlan(self.dtype, self.needs, quantizers, self.first_microbatch)
        own.requires_grad, own.in_first_forward = self.requires_grad, self.in_first_forward
        own.counts = self.counts
        own.fp8_weights = self.fp8_weights
        return own

    def copy(self) -> CallPlan:
        """A copy, for a single call."""
        own = CallPlan.__new__(CallPlan)
        for name in CallPlan.__slots__:
            setattr(own, name, getattr(self, name))
        own.unrecorded = None
        return own


def needs_of(inputs: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
    """`CallPlan.needs` of a call that autograd records: for its values and parameters."""
    return tuple([x is not None and x.requires_grad for x in inputs])


def joined_plan(chain: Any, plans: Sequence[CallPlan], needs: tuple[bool, ...]) -> CallPlan:
    """The plan of a chain, from the plans of its parts in order.

    `needs` says for each value that comes in whether its gradient is wanted.
    """
    joined = CallPlan(plans[0].dtype, needs)
    joined.chain = chain
    joined.compiling = plans[0].compiling
    joined.recordings = None if joined.compiling else Recordings()
    first = chain.inputs
    for plan in plans:
        shift = first - plan.chain.inputs
        joined.needs += plan.needs[plan.chain.inputs :]
        joined.fp8_weights += tuple([i + shift for i in plan.fp8_weights])
        joined.accumulates |= plan.accumulates
        joined.stage_plans = [*joined.stage_plans, *plan.stage_plans]
        joined.differentiable = [*joined.differentiable, *plan.differentiable]
        joined.caching = [*joined.caching, *plan.caching]
        joined.dropping = [*joined.dropping, *plan.dropping]
        first += plan.chain.arguments - plan.chain.inputs
    joined.requires_grad = any(joined.differentiable)
    return joined


def add_plan(plans: dict[Any, CallPlan], key: Any, plan: CallPlan, most: int) -> None:
    """Add a plan to `plans`; if there are `most` then, remove the oldest one before."""
    if len(plans) >= most:
        plans.pop(next(iter(plans)), None)
    plans[key] = plan


class EmptyInCopies:
    """Base of containers whose copies are empty, even where attributes are copied one by one.

    `torch.nn.utils.parametrize` makes such copies.
    """

    def __deepcopy__(self, memo: object) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[type[Any], tuple[()]]:
        return type(self), ()


class PlanCache(EmptyInCopies, dict[Any, CallPlan]):
    """The plans of one module. They point into its scaling state, so a copied module has none."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters: dict[tuple[str, type], Any] = {}

    def registered(self, name: str, kind: type, facts: Any) -> None:
        """Drop all plans, unless the last parameter of this name and class had the same facts.

        Keys of plans contain the classes of parameters. `fully_shard` registers a DTensor after
        each use of a layer, and the same whole parameter before the next one.
        """
        if self._parameters.get((name, kind), self) != facts:
            self._parameters[name, kind] = facts
            self.clear()


class DelayedTasks(EmptyInCopies, list[Any]):
    """`ParamGradTask`s of a stage that wait for `backward_dw`, oldest first.

    They hold tensors of a graph, so a copied stage has none.
    """
