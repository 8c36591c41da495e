"""Stages are what modules are made of: forward, data gradient, parameter gradients.

A stage reads values, and tensors that belong to the call (parameters, masks, angles), and makes
values. It holds no tensors of its own: what its backward needs goes out as `Saved`. Fusion is
negotiation: a stage is told what the next one requests (walking back: what the previous one
requests of its gradient), and may return `Operands` instead of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.fp8.operands import OperandRequest
from transformer_engine.pytorch.fp8.quantizers import IDENTITY, Quantizer

Parameters: TypeAlias = Sequence[torch.Tensor | None]


Values: TypeAlias = Sequence[Any]  # of a stage, in order; None is no gradient
Results: TypeAlias = tuple[Any, ...]


class Saved(NamedTuple):
    """What a stage leaves for its backward: tensors for autograd to save, and plain facts.

    `target` says where a weight gradient goes; it belongs to the call. `restored` is what the
    producer of its input has made again, see `Stage.restore`.
    """

    tensors: tuple[torch.Tensor | None, ...]
    facts: Any = None
    target: Any = None
    restored: Any = None


class Stage:
    """Base of all stages.

    `prepare` makes a plan: what the stage can decide once for all calls that share a
    `CallPlan`. Methods get that of their stage back.

    Attributes:
        label: what the printed data flow calls it.
        results: names of the values that it makes.
        parameter_count: how many tensors it reads beside values.
        draws: the last of those is a seed: None where the stage shall draw it itself.
        takes_pending: values that it reads, and gradients of its results, may be `Pending`.
        takes_strides: it reads values, and gradients of its results, of any strides; others get
            contiguous ones.
        not_settings: attributes that may differ between stages that compute the same.
        records_with_readers: it is recorded only where all who read its results are.
        communicates: ranks run it together. It is a segment by itself. Its results and gradients
            may be `Pending`, and the parameters' gradients of its consumer are computed meanwhile.
        restores: it can make its first result again, see `restore`.
        passes_requests: its result is its input, so what its consumer requests is for its producer.
        delayed: where the gradients of its parameters wait for somebody to compute them; None where
            the backward does.
    """

    label = "stage"
    results: tuple[str, ...] = ("result",)
    parameter_count = 0
    draws = False
    takes_pending = False
    takes_strides = False
    not_settings: tuple[str, ...] = ()
    records_with_readers = False
    communicates = False
    restores = False
    passes_requests = False
    delayed: Any = None

    def rename(self, layer: str) -> None:
        """The module that this stage is part of has another name now."""

    def settings(self) -> list[tuple[str, Any]]:
        """What tells it from other stages of its class, but for its name."""
        return sorted((k, v) for k, v in vars(self).items() if k not in self.not_settings)

    def prepare(self, call: CallPlan, first: int) -> Any:
        """The plan of the stage; its first parameter is number `first` of the call's inputs."""
        return call

    def recordable(self, plan: Any) -> bool:
        """Whether calls do nothing but allocate and call `_C`, the same for equal shapes."""
        return False

    def persistent_tensors(self, plan: Any) -> Sequence[torch.Tensor]:
        """What such calls read or write beside values and parameters."""
        return ()

    def caches(self, plan: Any) -> bool:
        """Whether calls read tensors that earlier ones have cached."""
        return False

    def cached(self, plan: Any) -> tuple[torch.Tensor | None, ...] | None:
        """Those tensors; None where they do not exist yet."""
        return None

    def detach_cache(self) -> None:
        """Take those tensors out of autograd's graph, which compiled code makes them part of."""

    def draw(self, plan: Any, device: torch.device) -> torch.Tensor | None:
        """A new seed; None where the plan has no use for one."""
        return None

    def accumulates(self, plan: Any) -> bool:
        """Whether `wgrad_target` may say something."""
        return False

    def wgrad_target(self, plan: Any, parameters: Parameters) -> Any:
        """Where the weight gradient of this call goes; None for a fresh tensor."""
        return None

    def request(self, plan: Any, x: torch.Tensor) -> OperandRequest | None:
        """What this stage wants its input to become; `x` is a tensor with as many tokens."""
        return None

    def grad_request(self, plan: Any, grad: torch.Tensor) -> OperandRequest | None:
        """What this stage wants the gradient of its result to become."""
        return None

    def forward(
        self, inputs: Values, parameters: Parameters, plan: Any, request: OperandRequest | None
    ) -> tuple[Results, Saved]:
        """The results, and what backward needs.

        Args:
            inputs: the values that it reads.
            parameters: tensors of the call.
            plan: what `prepare` has returned.
            request: of the stage that reads the first result, if that is the only one.
        """
        raise NotImplementedError

    def exported(self, inputs: Values, parameters: Parameters, plan: Any) -> Results:
        """The forward in torch's operators and those of `export`, for a graph of ONNX.

        Values may be in fp32 where they would only be rounded before a cast to FP8.
        """
        raise NotImplementedError

    def backward_data(
        self, grads: Values, saved: Saved, plan: Any, request: OperandRequest | None
    ) -> tuple[Results, Any]:
        """The gradients of the values that it read, and what `backward_params` carries on with.

        Args:
            grads: of its results; some may be None, not all.
            saved: what forward returned.
            plan: what `prepare` has returned.
            request: of the stage that made the first input, if no other stage reads that.
        """
        raise NotImplementedError

    def restore(self, saved: Saved, plan: Any) -> Any:
        """The first result as its consumer's `backward_params` reads it (`Saved.restored`).

        It may be pending; None where the consumer has kept what it needs.
        """

    def delays(self, plan: Any) -> bool:
        """Whether `backward_params` is left for later, with what `delayed` holds."""
        return False

    def backward_params(self, carry: Any, saved: Saved, plan: Any) -> Parameters:
        """The gradients of the parameters."""
        return ()


def quantizer_of(request: OperandRequest | None) -> Quantizer:
    """The quantizer of a request; the identity where nothing is requested."""
    return IDENTITY if request is None else request.quantizer
