"""A callable as two CUDA graphs, of its forward and its backward.

The graphs read and write fixed memory: a call copies its inputs into the memory of the samples and
replays. The backward does the same with output gradients, in a node of autograd's graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from transformer_engine.pytorch._torch_private import (
    TreeSpec,
    graph_task,
    memory_of,
    tree_flatten,
    tree_unflatten,
)
from transformer_engine.pytorch.attention.cache.inference import InferenceParams
from transformer_engine.pytorch.cuda_graphs.capture import Settings, capture_into
from transformer_engine.pytorch.cuda_graphs.saved_scaling import restore_scaling, save_scaling
from transformer_engine.pytorch.cuda_graphs.subject import FIRST_MICROBATCH, Subject
from transformer_engine.pytorch.fp8.autocast_stack import Step, autocast_stack, enter, leave

Tensors = tuple[torch.Tensor, ...]
Maybe = tuple[torch.Tensor | None, ...]


@dataclass
class Graphed:
    """A captured callable. The tensors among its samples are the inputs of the graphs."""

    subject: Subject
    settings: Settings
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any] = field(init=False)
    structure: TreeSpec = field(init=False)
    out_structure: TreeSpec = field(init=False)

    def __post_init__(self) -> None:
        self.leaves, self.structure = _flattened(self.args, self.kwargs)
        self.inputs: Tensors = tuple(t for t in self.leaves if isinstance(t, torch.Tensor))
        self.memory = {memory_of(t) for t in self.inputs}
        self.parameters: Tensors = ()
        self.frozen: Tensors = ()
        self.surface: Tensors = ()
        self.fused: list[Any] = []
        self._find_parameters()
        self.forward_graph = torch.cuda.CUDAGraph()
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Any, ...] = ()
        self.differentiable: tuple[bool, ...] = ()
        self.grad_outputs: Tensors = ()
        self.gradients: Maybe = ()  # of inputs, then of parameters
        scope = self.settings.scope
        self.updates = any(module.updates(scope) for module in self.subject.scaled)
        # Cached keys have no gradient: there is no backward to capture.
        self.generates = any(isinstance(leaf, InferenceParams) for leaf in self.leaves)
        self.was_reset = False
        self.subject.graphs += 1

    def _find_parameters(self) -> None:
        """Find the parameters whose gradients graphs compute; capture hooks may replace some."""
        self.parameters = self.subject.parameters(requires_grad=True)
        self.frozen = self.subject.parameters(requires_grad=False)
        self.surface = tuple(t for t in self.inputs if t.requires_grad) + self.parameters
        self.fused = [p for p in self.parameters if getattr(p, "main_grad", None) is not None]

    @property
    def _records(self) -> bool:
        """Whether autograd records a call now."""
        return torch.is_grad_enabled() and not self.generates

    def run(self) -> list[Any]:
        """Call the callable with the samples; returns flat outputs."""
        first = False if self.settings.caches_weights else None
        with torch.set_grad_enabled(self._records):
            # A module may override `__call__`, as Megatron's do: `forward` would be something else.
            out = self.subject.call(self.args, self.kwargs, first, self.subject.function)
        outputs, self.out_structure = tree_flatten(out)
        return outputs

    def warm_up(self) -> None:
        """Run forward and backward eagerly, so that the capture initialises nothing."""
        for _ in range(self.settings.warmup):
            self._before_forward()
            with autocast_stack().resumed(self.settings.scope) as stack:
                stack.warms_up = True
                every = self.run()
            self._after_forward(every)
            outputs = tuple(t for t in every if _has_gradient(t))
            if outputs and self.surface:
                ones = tuple(torch.ones_like(t) for t in outputs)
                self._run_hooks("backward_pre_hooks", ones)
                self._after_backward(self._gradients(outputs, ones), ones)

    def _before_forward(self) -> None:
        self._run_hooks("forward_pre_hooks", self.args, kwargs=self.kwargs)
        self._find_parameters()

    def _after_forward(self, outputs: Any) -> None:
        out = tree_unflatten(list(outputs), self.out_structure)
        self._run_hooks("forward_hooks", self.args, kwargs=self.kwargs, last=(out,))

    def _after_backward(self, found: Maybe, grad_outputs: Tensors) -> None:
        inputs = found[: len(self.surface) - len(self.parameters)]
        self._run_hooks("backward_hooks", inputs, grad_outputs)

    def _run_hooks(self, kind: str, *first: Any, **further: Any) -> None:
        self.subject.hooks.run(kind, self.subject.function, *first, **further)

    def _gradients(self, outputs: Tensors, grad_outputs: Tensors) -> Maybe:
        found: Maybe = torch.autograd.grad(
            outputs,
            self.surface,
            grad_outputs,
            allow_unused=True,
            retain_graph=self.settings.retain_graph,
        )
        if not self.settings.allow_unused:
            names = self._names()
            for i, gradient in enumerate(found):
                if gradient is None and not any(self.surface[i] is p for p in self.fused):
                    raise ValueError(
                        f"[make_graphed_callables] expected every input and parameter of "
                        f"{self.subject.where} to have a gradient, got none for {names[i]}; "
                        "allow_unused_input=True accepts that"
                    )
        return found

    def _names(self) -> list[str]:
        inputs = [f"input {i}" for i, t in enumerate(self.inputs) if t.requires_grad]
        if self.subject.module is None:
            return inputs
        named = self.subject.module.named_parameters()
        return inputs + [name for name, p in named if p.requires_grad]

    def capture_forward(self) -> None:
        """Capture the graph of the forward."""
        self._before_forward()
        with capture_into(self.settings, self.subject, "forward", self.forward_graph):
            self.outputs = tuple(self.run())
        self._after_forward(self.outputs)
        self.differentiable = tuple(_has_gradient(t) for t in self.outputs)

    def capture_backward(self) -> None:
        """Capture the graph of the backward, if an output needs a gradient."""
        outputs = tuple(t for t in self.outputs if _has_gradient(t))
        self.outputs = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in self.outputs)
        if not (outputs and self.surface):
            return
        self.grad_outputs = tuple(torch.empty_like(t) for t in outputs)
        self.backward_graph = torch.cuda.CUDAGraph()
        self._run_hooks("backward_pre_hooks", self.grad_outputs)
        with capture_into(self.settings, self.subject, "backward", self.backward_graph):
            every = self._gradients(outputs, self.grad_outputs)
        self._after_backward(every, self.grad_outputs)
        found = iter(every)
        inputs = [next(found) if t.requires_grad else None for t in self.inputs]
        self.gradients = (*inputs, *found)

    def write_inputs(self, values: Tensors) -> None:
        """Copy values to the samples. They may be samples themselves, or views of samples."""
        pairs = []
        for own, new in zip(self.inputs, values, strict=False):
            if own.data_ptr() != new.data_ptr() or own.stride() != new.stride():
                pairs.append((own, new.clone() if memory_of(new) in self.memory else new))
        for own, new in pairs:
            own.copy_(new)

    def reset(self) -> None:
        """Free the graphs and their memory; from now on the callable runs eagerly."""
        if self.was_reset:
            return
        self.was_reset = True
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()
        self.outputs, self.grad_outputs, self.gradients = (), (), ()
        self.subject.graphs -= 1
        if self.subject.graphs == 0 and self.subject.weights is not None:
            self.subject.weights.reset()
            self.subject.weights, self.subject.cached_weights = None, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay. After `reset` run eagerly; also while autograd is off, to record no amaxes."""
        if self.was_reset or (self.backward_graph is not None and not torch.is_grad_enabled()):
            return self.eager(*args, **kwargs)
        if self.updates and graph_task() != -1:
            raise RuntimeError(
                f"[make_graphed_callables] expected {self.subject.where} outside of checkpoints, "
                "got a call within a backward: let the callable checkpoint what is inside of it"
            )
        first = self._first_microbatch(kwargs)
        inputs = self._checked(args, kwargs)
        if self._records and any(p.requires_grad for p in self.frozen):
            self._refuse_parameters()
        subject, scope = self.subject, self.settings.scope
        subject.check_states()
        enter(scope)
        try:
            subject.update_weights(first)
            for p in self.fused if first else ():
                p.main_grad.zero_()
            stack, step = autocast_stack(), None
            if self.updates:
                for module in subject.scaled:
                    stack.step.join(scope, module.scaling)
                if self.backward_graph is not None and stack.step.first_pending:
                    step = stack.take_backward_end()
            out = _Replay.apply(self, step, *inputs, *self.parameters)
        finally:
            leave()
        return tree_unflatten(list(out), self.out_structure)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable without graphs."""
        first = self._take_first(kwargs)
        return self.subject.call(args, kwargs, first if self.settings.caches_weights else None)

    def _first_microbatch(self, kwargs: dict[str, Any]) -> bool:
        first = self._take_first(kwargs)
        if not self.settings.caches_weights:
            return False
        if not isinstance(first, bool):
            raise TypeError(
                "[make_graphed_callables] expected is_first_microbatch in every call with "
                f"fp8_weight_caching, got {first} ({self.subject.where})"
            )
        return first

    def _take_first(self, kwargs: dict[str, Any]) -> Any:
        """Take `is_first_microbatch` out of the keywords of a call if it is for the graphs."""
        own = FIRST_MICROBATCH in self.kwargs and not self.settings.caches_weights
        return None if own else kwargs.pop(FIRST_MICROBATCH, None)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
        leaves, structure = _flattened(args, kwargs)
        if structure != self.structure:
            raise TypeError(
                f"[make_graphed_callables] expected arguments as {self.subject.where} was captured "
                f"with, {self.structure}, got {structure}"
            )
        for i, (own, new) in enumerate(zip(self.leaves, leaves, strict=True)):
            if isinstance(own, torch.Tensor) and isinstance(new, torch.Tensor):
                same = own.shape == new.shape and own.dtype is new.dtype
                if self._records and new.requires_grad and not own.requires_grad:
                    self._refuse_gradient(i)
            elif isinstance(own, torch.Tensor) or isinstance(new, torch.Tensor):
                same = False
            else:
                same = own is new or own == new
            if not same:
                raise ValueError(
                    f"[make_graphed_callables] expected argument {i} of {self.subject.where} as it "
                    f"was captured with, {_described(own)}, got {_described(new)}"
                )
        return tuple(t for t in leaves if isinstance(t, torch.Tensor))

    def _refuse_parameters(self) -> NoReturn:
        """Name the parameters that need a gradient and needed none at the capture."""
        assert self.subject.module is not None  # it has parameters
        named = self.subject.module.named_parameters()
        new = [n for n, p in named if p.requires_grad and any(p is own for own in self.frozen)]
        raise ValueError(
            f"[make_graphed_callables] expected the parameters of {self.subject.where} that were "
            f"captured with requires_grad=False to keep it, got requires_grad=True for "
            f"{', '.join(new)}, whose gradients the graph does not compute: capture again"
        )

    def _refuse_gradient(self, i: int) -> NoReturn:
        """Name the argument that needs a gradient where its sample needed none."""
        raise ValueError(
            f"[make_graphed_callables] expected argument {i} of {self.subject.where} without "
            "requires_grad, like its sample, got one that needs a gradient, which the graph does "
            "not compute: capture with a sample that has requires_grad=True"
        )


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: Graphed, step: Step | None, *inputs: torch.Tensor) -> Any:
        ctx.graphed, ctx.step = graphed, step
        ctx.set_materialize_grads(False)
        # Gradients are cloned: autograd may keep them as `.grad` of a leaf, also of one behind a
        # view or a sum. But another replay, which made the input, copies the gradient at once.
        ctx.clones = [not hasattr(t.grad_fn, "graphed") for t in inputs[: len(graphed.inputs)]]
        with torch.no_grad():
            graphed.write_inputs(inputs)
        graphed.forward_graph.replay()
        outputs = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in graphed.outputs)
        tensors = zip(outputs, graphed.differentiable, strict=True)
        plain = [t for t, own in tensors if isinstance(t, torch.Tensor) and not own]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        graphed: Graphed = ctx.graphed
        new = [g for g, own in zip(grads, graphed.differentiable, strict=True) if own]
        for own, grad in zip(graphed.grad_outputs, new, strict=True):
            if grad is None:
                own.zero_()
            elif own.data_ptr() != grad.data_ptr():
                own.copy_(grad)
        assert graphed.backward_graph is not None
        graphed.backward_graph.replay()
        for p in graphed.fused:
            if hasattr(p, "grad_added_to_main_grad"):
                p.grad_added_to_main_grad = True
        if ctx.step is not None:
            ctx.step.end_backward()
        count = len(graphed.inputs)
        clones = [
            *ctx.clones,
            *[graphed.settings.clones_gradients] * len(graphed.gradients[count:]),
        ]
        gradients = zip(graphed.gradients, clones, strict=True)
        made = [g if g is None else g.clone() if copies else g.detach() for g, copies in gradients]
        return (None, None, *made)


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of the arguments, regardless of the order of keywords and of Nones."""
    named = {name: x for name, x in sorted(kwargs.items()) if x is not None}
    return tree_flatten((args, named))


def _has_gradient(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.requires_grad


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device}"
    return repr(leaf)


@contextmanager
def state_restored(subjects: Iterable[Subject]) -> Iterator[None]:
    """Restore scaling state and `main_grad`, so that warm-up and capture change neither."""
    subjects = list(subjects)
    modules = list(dict.fromkeys(module for subject in subjects for module in subject.scaled))
    saved = save_scaling(modules)
    parameters = dict.fromkeys(
        p for subject in subjects for p in subject.parameters(requires_grad=True)
    )
    found = [getattr(p, "main_grad", None) for p in parameters]
    grads = [(grad, grad.clone()) for grad in found if grad is not None]
    try:
        yield
    finally:
        restore_scaling(modules, saved)
        for grad, old in grads:
            grad.copy_(old)
