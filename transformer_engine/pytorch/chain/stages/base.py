"""Stages are what modules are made of: forward, data gradient, parameter gradients.

A stage holds no tensors of its own: parameters come in with every call, and what backward needs
goes out as `Saved`. Fusion is negotiation: a stage is told what the next one demands (walking back:
what the previous one demands of its gradient), and may return `Operands` instead of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from transformer_engine.pytorch.fp8.operands import Demand, Result, Value
from transformer_engine.pytorch.fp8.quantizers import IDENTITY, GemmQuantizers, Quantizer

Parameters: TypeAlias = Sequence[torch.Tensor | None]


class Saved(NamedTuple):
    """What a stage keeps for backward: tensors for autograd to hold, and plain facts."""

    tensors: tuple[torch.Tensor | None, ...]
    facts: Any = None
    tap: torch.Tensor | None = None  # forward: a second result of the chain; backward: its gradient


class Run:
    """The facts of a call of a chain. They seldom change, so modules keep their runs.

    Args:
        dtype: of activations.
        needs: whether a gradient is wanted, of the input and of each parameter in order.
        quantizers: of each Matmul in order.
        first_microbatch: what the caller said.
        ends_backward: the backward of this call is the last of its step.

    Attributes:
        rehearses: autograd does not record this call, and will record one that repeats it. Its
            stages do all the same, so that no bit differs.
        repeats: this call repeats one (see `regions`).
        replayed: its forward ran from a tape.
        again: the run of calls that repeat those of this one.
        scales: where such a run finds the scales of the call that it repeats.
        columns: of the module's scaling state that it casts with.
    """

    __slots__ = (
        "again",
        "caching",
        "chain",
        "columns",
        "compiling",
        "dtype",
        "ends_backward",
        "exporting",
        "first_microbatch",
        "inspect_at",
        "inspection",
        "kept",
        "needs",
        "plans",
        "quantizers",
        "recording",
        "rehearses",
        "repeats",
        "replayed",
        "replays",
        "scales",
    )

    def __init__(
        self,
        dtype: torch.dtype,
        needs: tuple[bool, ...],
        quantizers: Sequence[GemmQuantizers] = (),
        first_microbatch: bool | None = None,
        ends_backward: bool = False,
    ) -> None:
        self.dtype = dtype
        self.needs = needs
        self.quantizers = quantizers
        self.first_microbatch = first_microbatch
        self.ends_backward = ends_backward
        self.recording = any(needs)  # autograd will call backward
        self.rehearses = self.repeats = self.replayed = False
        self.again: Run | None = None
        self.scales: torch.Tensor | None = None
        self.columns: Any = None
        self.chain: Any = None  # that planned it
        self.plans: Sequence[Any] = ()  # of each stage
        self.compiling = False
        self.exporting = False  # to ONNX, see export.py
        self.kept: tuple[int, ...] = ()  # which of (input, parameters) are weights kept in FP8
        self.caching: Sequence[Any] = ()  # the stages that read what they have cached
        self.inspect_at = 0  # the tick of the inspector from which it may want to look
        self.inspection: Any = None  # what it decided last
        self.replays: dict[Any, Any] | None = None  # by shape of the input; None: by stages alone

    def once(self, ends_backward: bool) -> Run:
        """The same run, for one call."""
        own = Run.__new__(Run)
        for name in Run.__slots__:
            setattr(own, name, getattr(self, name))
        own.ends_backward, own.replayed = ends_backward, False
        return own


def needs_of(input_needs: bool, parameters: Parameters) -> tuple[bool, ...]:
    """`Run.needs`, where autograd records."""
    return (input_needs, *[p is not None and p.requires_grad for p in parameters])


class Stage:
    """Base of all stages. `slot` is the index of its first parameter in the chain's list.

    `prepare` turns a run into a plan: whatever the stage can decide once for all calls of that run.
    """

    parameter_count = 0
    slot = 0

    def rename(self, layer: str) -> None:
        """The module that this stage is part of has another name now."""

    def prepare(self, run: Run) -> Any:
        """The plan; the run itself where there is nothing to decide."""
        return run

    def replayable(self, plan: Any) -> bool:
        """Whether calls of this plan do nothing but allocate and call `_C`, always alike."""
        return False

    def caches(self, plan: Any) -> bool:
        """Whether calls of this plan read tensors kept from earlier ones."""
        return False

    def cached(self, plan: Any) -> tuple[torch.Tensor | None, ...] | None:
        """Those tensors; None where they are yet to be made."""
        return None

    def detach_cache(self) -> None:
        """Take those tensors out of autograd's graph, which compiled code makes them part of."""

    def demand(self, plan: Any, x: torch.Tensor) -> Demand | None:
        """What this stage wants its input to become; `x` is a tensor with as many tokens."""
        return None

    def grad_demand(self, plan: Any, grad: torch.Tensor) -> Demand | None:
        """What this stage wants the gradient of its output to become."""
        return None

    def forward(
        self, x: Value, parameters: Parameters, plan: Any, wants: Demand | None
    ) -> tuple[Result, Saved]:
        """The output, and what backward needs."""
        raise NotImplementedError

    def exported(self, x: torch.Tensor, parameters: Parameters, plan: Any) -> torch.Tensor:
        """The forward in torch's operators and those of `export.py`, for a graph of ONNX.

        `x` and the result may be in fp32 where they would only be rounded before a cast to FP8.
        """
        raise NotImplementedError

    def backward_data(
        self, grad: Value, saved: Saved, plan: Any, wants: Demand | None
    ) -> tuple[Result | None, Any]:
        """The gradient of the input, and what `backward_params` carries on with."""
        raise NotImplementedError

    def backward_params(self, carry: Any, saved: Saved, plan: Any) -> Parameters:
        """The gradients of the parameters."""
        return ()


def quantizer_of(wants: Demand | None) -> Quantizer:
    """The quantizer of a demand; the identity where nothing is demanded."""
    return IDENTITY if wants is None else wants.quantizer
