"""`Stage`, the base class of the steps of a module: forward, data and parameter gradients.

A stage reads values and parameters (tensors of the call: weights, masks, angles), and makes values.
It holds no tensors: `forward` returns what the backward needs as `Saved`. Fusion is negotiated: a
stage gets the `OperandRequest` of the next stage (in the backward: of the previous stage, for its
gradient), and may return `Operands` instead of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.fp8.casts.operands import OperandRequest
from transformer_engine.pytorch.fp8.casts.quantizers import IDENTITY, Quantizer

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.recipe_quantizers import StateInMemory

Parameters: TypeAlias = Sequence[torch.Tensor | None]
Values: TypeAlias = Sequence[Any]  # inputs of a stage, or gradients of its results (or None)
Results: TypeAlias = tuple[Any, ...]
Recomputes: TypeAlias = Literal["nothing", "values", "operands"]


class ResultRequest(NamedTuple):
    """The result that a stage computes again in its backward, if the next stage has not saved it.

    Attributes:
        scales: fp32 `[2]`, {1/scale, scale} of transposed codes; None for the plain result.
        format: format of the codes, a value of `DType`.
        rounded: the result is rounded to its dtype before it is cast.
    """

    scales: torch.Tensor | None
    format: int
    rounded: bool


class Saved(NamedTuple):
    """What a stage saves for its backward.

    Attributes:
        tensors: saved by autograd.
        facts: anything that is no tensor.
        target: where the weight gradient goes, a `WgradTarget`; set for the backward.
        input_again: the input, if it was not saved: gathered again, see `Stage.regather`, or
            computed again, see `Stage.recomputes`.
        result_request: how the next stage needs the first result again; set for the backward.
    """

    tensors: tuple[torch.Tensor | None, ...]
    facts: Any = None
    target: Any = None
    input_again: Any = None
    result_request: ResultRequest | None = None


class Stage:
    """Base of all stages.

    `prepare` makes the stage's own plan: what it decides once for all calls that share a
    `CallPlan`. The other methods get this plan as `plan`.

    Attributes:
        label: name in the printed data flow.
        results: names of the values that it makes.
        parameter_count: number of its parameters: the tensors that it reads beside values.
        draws: its last parameter is a seed, which is drawn for each call that passes None.
        multiplies: it is a `Matmul`.
        takes_pending: its inputs, and gradients of its results, may be `Pending`.
        takes_strides: its inputs, and gradients of its results, may have any strides; other stages
            get contiguous tensors.
        lasting: attributes that outlive a change of the module's settings.
        not_settings: attributes that may differ between stages that compute the same.
        records_with_readers: it is recorded only together with all stages that read its results.
        communicates: it is a collective, and a segment by itself, unless it `joins` others. Its
            results and gradients may be `Pending`; while its backward runs, the parameter gradients
            of its consumer are computed.
        in_parts: it is a collective that transfers large tensors rank by rank.
        token_ratio: tokens (the first size) of its results, divided by those of its first input.
        regathers: see `regather`.
        passes_requests: its result is its input, so its producer gets the request of its consumer.
        options_vary: `options_in` returns different options for different shapes.
        delayed: the tasks that wait for `backward_dw`; None if the backward computes all gradients.
    """

    label = "stage"
    results: tuple[str, ...] = ("result",)
    parameter_count = 0
    draws = False
    multiplies = False
    takes_pending = False
    takes_strides = False
    lasting: tuple[str, ...] = ()
    not_settings: tuple[str, ...] = ()
    records_with_readers = False
    communicates = False
    in_parts = False
    token_ratio: Fraction | int = 1
    regathers = False
    passes_requests = False
    options_vary = False
    delayed: Any = None

    def records_strides(self, plan: Any) -> bool:
        """Whether a recording may take inputs of any strides, because the stage copies none."""
        return self.takes_strides

    def rename(self, layer: str) -> None:
        """Take the new name of the module that the stage is part of."""

    def settings(self) -> list[tuple[str, Any]]:
        """The attributes that decide what it computes, by name."""
        return sorted((k, v) for k, v in vars(self).items() if k not in self.not_settings)

    def described(self, plan: Any) -> str:
        """A text that says what it computes in a call, which must be equal on all ranks."""
        plain = [
            f"{name}={value}"
            for name, value in self.settings()
            if isinstance(value, int | float | str | tuple)
            and name != "results"
            and not name.startswith("_")
        ]
        return f"{self.label}({', '.join(plain)})"

    def describe_options(self, options: Any) -> tuple[Any, ...] | None:
        """Constants that describe the options of calls in compiled code, see `options_in`.

        None if no operator of several parts can run such calls.
        """
        return (options,)

    def options_in(
        self, described: tuple[Any, ...], shapes: Sequence[torch.Size], state: StateInMemory | None
    ) -> Any:
        """The options of a call.

        Args:
            described: returned by `describe_options`.
            shapes: for each value that comes into the part, the shape of a value with as many
                tokens.
            state: scaling state of the call; None if there is none.
        """
        return described[0]

    def prepare(self, call: CallPlan, first: int) -> Any:
        """Make the plan; the stage's first parameter is number `first` of the call's inputs."""
        return call

    def recomputes(self) -> Recomputes:
        """In which forms `backward_data` can compute the first result again.

        The next stage then need not save it. `"values"`: only the plain result. `"operands"`: also
        its transposed codes. `Saved.result_request` says which form is needed.
        """
        return "nothing"

    def omit_input(self, plan: Any, again: Recomputes, grad_outlives: bool) -> None:
        """Plan not to save the first input, if possible: the stage before computes it again.

        Args:
            plan: returned by `prepare`.
            again: what the stage before can compute.
            grad_outlives: autograd keeps the gradient of the first result until the backward of
                the whole chain is done.
        """

    def recordable(self, plan: Any) -> bool:
        """Whether calls do nothing but allocate and call `_C`, the same for equal shapes."""
        return False

    def joins(self, first: torch.Tensor) -> bool:
        """Whether a collective is recorded together with the stages around it.

        Args:
            first: the first value that comes into the chain.
        """
        return False

    def persistent_tensors(self, plan: Any) -> Sequence[torch.Tensor]:
        """The tensors that recordable calls read or write beside values and parameters."""
        return ()

    def caches(self, plan: Any) -> bool:
        """Whether calls read tensors that earlier ones have cached."""
        return False

    def cached(self, plan: Any) -> tuple[torch.Tensor | None, ...] | None:
        """The cached tensors; None if they do not exist yet."""
        return None

    def detach_cache(self) -> None:
        """Detach cached tensors from autograd's graph, which compiled code makes them part of."""

    def draw(self, plan: Any, device: torch.device) -> torch.Tensor | None:
        """A new seed; None if the plan needs none."""
        return None

    def accumulates(self, plan: Any) -> bool:
        """Whether `wgrad_target` may return a target."""
        return False

    def wgrad_target(self, plan: Any, parameters: Parameters) -> Any:
        """Where the weight gradient of this call goes; None for a new tensor."""
        return None

    def request(self, plan: Any, x: torch.Tensor) -> OperandRequest | None:
        """The request for the first input; `x` is a tensor with as many tokens as the input."""
        return None

    def grad_request(self, plan: Any, grad: torch.Tensor) -> OperandRequest | None:
        """The request for the gradient of the first result."""
        return None

    def weight_request(self, plan: Any) -> OperandRequest | None:
        """The request for its weight, if that may be cast before `forward`, together with others.

        `forward` then gets a `CastWeight` instead of the weight. None if it must cast the weight
        itself, or casts none.
        """
        return None

    def forward(
        self, inputs: Values, parameters: Parameters, plan: Any, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """The results, and what backward needs.

        Args:
            inputs: the values that it reads.
            parameters: tensors of the call.
            plan: returned by `prepare`.
            request: the request of the only stage that reads the first result; None if there are
                more.
        """
        raise NotImplementedError

    def exported(self, inputs: Values, parameters: Parameters, plan: Any) -> Results:
        """The forward in operators of torch and of `export`, for an ONNX graph.

        Values may stay in fp32 if their only use is a cast to FP8.
        """
        raise NotImplementedError

    def backward_data(
        self, grads: Values, saved: Saved, plan: Any, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradients of its inputs, and whatever `backward_params` needs from here (`carry`).

        With `saved.result_request` a pair instead of `carry`: the first result, and `carry`.

        Args:
            grads: gradients of its results; some may be None, not all.
            saved: returned by `forward`.
            plan: returned by `prepare`.
            request: the request of the stage that made the first input, for its gradient; None if
                other stages read that input, too.
        """
        raise NotImplementedError

    def input_request(self, saved: Saved, plan: Any) -> ResultRequest | None:
        """The request for the first input, if it was not saved; see `omit_input`."""
        return None

    def regather(self, saved: Saved, plan: Any) -> Any:
        """Gather the first result again, for `backward_params` of its consumer.

        The result may be pending; None if the consumer has saved what it needs.
        """

    def delays(self, plan: Any) -> bool:
        """Whether `backward_params` waits in `delayed` for `backward_dw`."""
        return False

    def backward_params(self, carry: Any, saved: Saved, plan: Any) -> Parameters:
        """The gradients of the parameters."""
        return ()


def quantizer_of(request: OperandRequest | None) -> Quantizer:
    """The quantizer of a request; the identity where nothing is requested."""
    return IDENTITY if request is None else request.quantizer
