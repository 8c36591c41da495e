"""`Subject`: a callable that is captured, with its modules of this package and their FP8 state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.cuda_graphs.hooks import CaptureTimeHooks
from transformer_engine.pytorch.cuda_graphs.saved_scaling import scaled_modules
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.fp8.scaling_state import ScalingState
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

FIRST_MICROBATCH = "is_first_microbatch"


class Subject:
    """A module or function that is captured, and the modules of this package in it."""

    def __init__(
        self, function: Callable[..., Any], where: str, hooks: CaptureTimeHooks | None = None
    ) -> None:
        self.function = function
        self.where = where
        self.hooks = hooks or CaptureTimeHooks(None, where)
        self.graphs = 0  # the number of graphs that were not reset
        self.module = function if isinstance(function, nn.Module) else None
        self.scaled = scaled_modules(() if self.module is None else (self.module,))
        self.ours = [m for m in self.scaled if isinstance(m, TransformerEngineBaseModule)]
        self.training = self.module is not None and self.module.training
        self.forward = function if self.module is None else self.module.forward
        self.takes_first = _takes_first(self.forward, self.module is None)
        self.weights: torch.cuda.CUDAGraph | None = None  # casts weights to where graphs read them
        # That memory, with the module and the number of the GEMM that each weight belongs to.
        self.cached_weights: list[tuple[TransformerEngineBaseModule, int, Any]] = []
        self.states: list[tuple[ScaledModule, str, ScalingState, int]] = []

    def parameters(self, requires_grad: bool) -> tuple[nn.Parameter, ...]:
        """Returns the parameters that need gradients, or those that need none."""
        every = () if self.module is None else self.module.parameters()
        return tuple([p for p in every if p.requires_grad is requires_grad])

    def call(
        self,
        args: Any,
        kwargs: Any,
        first_microbatch: bool | None = None,
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Run the callable; `first_microbatch` overrides `is_first_microbatch` in all its modules.

        None leaves `is_first_microbatch` as callers pass it. The original `forward` is called if
        there is no other `function`.
        """
        function = function or self.forward
        if first_microbatch is None:
            return function(*args, **kwargs)
        if self.takes_first:
            kwargs = {**kwargs, FIRST_MICROBATCH: first_microbatch}
        for module in self.ours:
            module.first_microbatch = first_microbatch
        try:
            return function(*args, **kwargs)
        finally:
            for module in self.ours:
                vars(module).pop("first_microbatch", None)

    def update_weights(self, first_microbatch: bool) -> None:
        """Let the graphs read the weights that an eager call would read now.

        The modules then share the memory of the graphs, so that eager calls read it, too.
        """
        if self.weights is None:
            return
        found = [(m.chain.matmuls[i], own) for m, i, own in self.cached_weights]
        if first_microbatch or not all([own.can_take(s.cached_weight) for s, own in found]):
            self.weights.replay()
            # A replay does not count its writes, by which a backward that is still to come detects
            # that the weights which it has saved were overwritten.
            written = [x for _, own in found for x in own.tensors if x is not None]
            torch.autograd.graph.increment_version(written)
        else:
            for stage, own in found:
                own.take(stage.cached_weight)
        for stage, own in found:
            stage.cached_weight = own

    def drop_weights(self) -> None:
        """Drop what warm-ups and captures have cached: a capture computes no values."""
        for module, i, _ in self.cached_weights:
            module.chain.matmuls[i].cached_weight = None

    def record_states(self) -> None:
        """Remember the FP8 states, whose addresses the graphs hold."""
        self.states = [
            (module, direction, state, state.version)
            for module in self.scaled
            for direction, state in module.scaling.items()
        ]

    def check_states(self) -> None:
        """Raise RuntimeError if a module has another FP8 state than at the capture."""
        for module, direction, state, version in self.states:
            if module.scaling.get(direction) is not state or state.version != version:
                raise RuntimeError(
                    f"[make_graphed_callables] expected the FP8 state of layer {module.name} that "
                    f"{self.where} was captured with, got another one (a loaded state dict, another"
                    " amax_history_len): capture again"
                )

    def trackers(self) -> list[Any]:
        """The RNG state trackers of the modules, each once."""
        parts = () if self.module is None else self.module.modules()
        found = [getattr(part, "get_rng_state_tracker", None) for part in parts]
        made = [get() for get in dict.fromkeys(found) if get is not None]
        return [t for t in {id(t): t for t in made}.values() if hasattr(t, "register_with")]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # of a builtin
        return {}


def _takes_first(forward: Callable[..., Any], is_function: bool) -> bool:
    parameters = _parameters(forward)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return FIRST_MICROBATCH in parameters or (is_function and any_name)


def replace_forward(
    module: nn.Module, forward: Callable[..., Any], freed: Callable[[], Any]
) -> None:
    """Replace the `forward` of a module.

    The module also gets a method `reset`, which calls `freed` and restores the `forward`. Deep
    copies of the module have the `forward` from before, and nothing to reset.
    """
    before = vars(module).get("forward")

    def reset() -> None:
        freed()
        for name in ("forward", "reset"):
            vars(module).pop(name, None)
        if before is not None:
            module.forward = before

    module.forward = _Replacement(forward, module.forward)
    module.reset = _Replacement(reset, _nothing)  # type: ignore[assignment]


class _Replacement:
    """Stands in a module for a method, which deep copies of the module have again."""

    def __init__(self, function: Callable[..., Any], method: Callable[..., Any]) -> None:
        self._function = function
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._method, memo)  # a method of the copied module


def not_graphed(function: Callable[..., Any], caches: bool) -> Callable[..., Any]:
    """A callable without a graph, with the interface of one that has a graph.

    If it `caches`, calls pass `is_first_microbatch`, see `cache_quantized_params`.
    """
    subject = Subject(function, "")
    if caches and subject.module is not None and not subject.takes_first:

        def forward(*args: Any, **kwargs: Any) -> Any:
            return subject.call(args, kwargs, kwargs.pop(FIRST_MICROBATCH, None))

        replace_forward(subject.module, forward, _nothing)
    else:
        with suppress(AttributeError):  # some callables take no attributes
            function.reset = _nothing  # type: ignore[attr-defined]
    return function


def _nothing() -> None:
    """The `reset` of a callable without a graph."""
