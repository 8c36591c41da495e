"""`Attention`: the stage of a chain that runs the two functions of a backend.

The settings of a call are part of the plan, and its tensors are parameters of the stage. So equal
calls share a plan, and may be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import constant_in_graphs
from transformer_engine.pytorch.attention.backends import BACKENDS
from transformer_engine.pytorch.attention.backends.backend import NO_BACKWARD, Backend, Needs
from transformer_engine.pytorch.attention.backends.backend import Saved as SavedByBackend
from transformer_engine.pytorch.attention.core.call import (
    TENSORS,
    Call,
    CallTensors,
    plain_call,
    shape_of,
)
from transformer_engine.pytorch.attention.core.casts import described_casts
from transformer_engine.pytorch.attention.core.formats import shapes_of_heads
from transformer_engine.pytorch.attention.masks.masks import MaskRule, MaskType
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters, Results, Saved, Stage, Values
from transformer_engine.pytorch.dtypes import without_autocast
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.fp8.recipe_quantizers import StateInMemory

_BIAS, _SINK = CallTensors._fields.index("bias"), CallTensors._fields.index("sink")


class Options(NamedTuple):
    """What calls of attention that share a plan have in common.

    Attributes:
        backend: the backend that runs the calls.
        call: the settings of the calls, without tensors.
        same_ends: queries and keys have the same tensor `cu_seqlens`, which is passed once, for
            queries.
        same_starts: the same for `cu_seqlens_padded`.
        repeatable: gradients must repeat bit for bit.
    """

    backend: Backend
    call: Call
    same_ends: bool
    same_starts: bool
    repeatable: bool


class _Plan(NamedTuple):
    options: Options
    needs: Needs
    compiling: bool
    alone: bool  # no other stage is in the chain


@constant_in_graphs
def is_recorded_on(device: str) -> bool:
    """Whether any backend can be recorded on devices of this type."""
    return any([device in one.records_on for one in BACKENDS])


class Attention(Stage):
    """softmax(query key^T * scale + bias) value, for each head.

    The inputs are query, key and value in the format of the call, the result is `[..., heads *
    size]`. The parameters are the `CallTensors` and the seed of dropout. `CallPlan.options` is an
    `Options`.
    """

    label = "attention"
    takes_strides = True
    results = ("context",)
    parameter_count = TENSORS + 1
    draws = True
    options_vary = True

    def described(self, plan: _Plan) -> str:
        """See the base class."""
        call = plan.options.call
        settings = f"scale={call.scale}, dropout={call.dropout.p}, sink={call.sink.type}"
        return f"{self.label}({call.shape.rule}, bias={call.bias.type}, {settings})"

    def describe_options(self, options: Options) -> tuple[Any, ...] | None:
        """See the base class; None for calls that should not become an operator of compiled code.

        An operator is made of calls without further tensors and random numbers, if the backend can
        be recorded. With other backends it would gain nothing: the compiler fuses what they run.
        """
        backend, call, *_, fixed = options
        shape, casts = call.shape, call.casts
        plain = call._replace(casts=None).is_plain
        if not plain or shape.band is None or not backend.recordable(call):
            return None
        rule = (tuple(shape.rule.type), *shape.rule[1:])
        heads, sizes = (shape.heads, shape.groups), (shape.key_size, shape.value_size)
        settings = (call.scale, call.training, fixed)
        of_casts = None if casts is None else casts.description()
        return (backend.name, shape.qkv_format, rule, heads, sizes, *settings, of_casts)

    def options_in(
        self, described: tuple[Any, ...], shapes: Sequence[torch.Size], state: StateInMemory | None
    ) -> Options:
        """The options that `describe_options` has described, for inputs of these shapes."""
        name, qkv_format, (kind, *sides), heads, sizes, scale, training, fixed, of_casts = described
        rule = MaskRule(MaskType(*kind), *sides)
        tokens = shapes_of_heads([x[:-1] for x in shapes], heads, sizes)
        call = plain_call(shape_of(qkv_format, heads, sizes, tokens, rule), scale, training)
        if state is not None:
            call = call._replace(casts=described_casts(of_casts, state).settings())
        backend = next(one for one in BACKENDS if one.name == name)
        return Options(backend, call, False, False, fixed)

    def prepare(self, call: CallPlan, first: int) -> _Plan:
        """Find out which gradients the backward must compute."""
        needs = NO_BACKWARD
        if call.compiling:
            # Floats may be symbols, which Dynamo must find before autograd is entered (adr/0003).
            of_call = call.options.call
            _ = of_call.scale > 0.0, of_call.dropout.p > 0.0
        if call.requires_grad:
            query, key, value = call.needs[:3]
            needs = Needs(query, key, value, call.needs[first + _BIAS], call.needs[first + _SINK])
        return _Plan(call.options, needs, call.compiling, len(call.chain.steps) == 1)

    def recordable(self, plan: _Plan) -> bool:
        """Whether the backend can be recorded; under context parallelism, only in its own chain.

        In the chain of a layer, keys are views of a projection, and torch would copy them before
        they are sent.
        """
        backend, call, *_ = plan.options
        return backend.recordable(call) and (plan.alone or call.context is None)

    def records_strides(self, plan: _Plan) -> bool:
        """See the base class; under context parallelism keys are copied before they are sent."""
        return plan.options.call.context is None

    def persistent_tensors(self, plan: _Plan) -> Sequence[torch.Tensor]:
        """The persistent tensors of the backend."""
        return plan.options.backend.persistent(plan.options.call)

    def draw(self, plan: _Plan, device: torch.device) -> torch.Tensor | None:
        """A seed, if the backend takes one, from the call's tracker or torch's generator."""
        draw, (p, tracker, _) = plan.options.backend.draw_seed, plan.options.call.dropout
        if draw is None or p == 0.0:
            return None
        if tracker is None:
            return draw(device)
        with tracker.fork():
            return draw(device)

    def forward(
        self, inputs: Values, parameters: Parameters, plan: _Plan, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """Run the backend's forward."""
        backend, call, same_ends, same_starts, _ = plan.options
        tensors = CallTensors(*parameters[:-1])
        if same_ends:
            tensors = tensors._replace(cu_seqlens_kv=tensors.cu_seqlens_q)
        if same_starts:
            tensors = tensors._replace(cu_seqlens_kv_padded=tensors.cu_seqlens_q_padded)
        call = call.with_tensors(tensors, parameters[-1])
        query, key, value = inputs
        out, saved = run_forward(backend, query, key, value, call, plan.needs)
        if not plan.compiling and out._is_view():
            out = out.detach()  # autograd refuses in-place changes of views that functions return
        if saved is None:
            return (out,), Saved(())
        return (out,), Saved((saved.log_sum_exp, *saved.tensors), saved.facts)

    def backward_data(
        self, grads: Values, saved: Saved, plan: _Plan, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """Gradients of query, key and value; those of bias and sink go to `backward_params`."""
        backend, call, *_ = plan.options
        of_backend = SavedByBackend(saved.tensors[0], saved.tensors[1:], saved.facts)
        with without_autocast(grads[0].device.type):
            gradients = backend.backward(grads[0], of_backend, call, plan.needs)
        return gradients[:3], gradients[3:]

    def backward_params(self, carry: Any, saved: Saved, plan: _Plan) -> Parameters:
        """Gradients of bias and sink, which `backward_data` has computed."""
        found: list[torch.Tensor | None] = [None] * self.parameter_count
        found[_BIAS], found[_SINK] = carry
        return found


def run_forward(
    backend: Backend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    needs: Needs,
) -> tuple[torch.Tensor, SavedByBackend | None]:
    """The forward of a backend, inside of the call's tracker if the backend draws by itself.

    It runs without `torch.autocast`, as the backward does: the inputs have their final dtype.
    """
    tracker = call.dropout.tracker
    with without_autocast(query.device.type):
        if tracker is None or backend.draw_seed is not None:
            return backend.forward(query, key, value, call, needs)
        with tracker.fork():
            return backend.forward(query, key, value, call, needs)
