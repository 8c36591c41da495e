"""CUDA graphs that are emulated on the CPU: "replays" run the callable again."""

from contextlib import contextmanager

import pytest
import torch

from transformer_engine.pytorch.cuda_graphs import capture, graphed
from transformer_engine.pytorch.cuda_graphs.capture import Settings, capture_weights
from transformer_engine.pytorch.cuda_graphs.graphed import Graphed, state_restored
from transformer_engine.pytorch.cuda_graphs.hooks import capture_time_hooks_of
from transformer_engine.pytorch.cuda_graphs.order import CaptureOrder
from transformer_engine.pytorch.cuda_graphs.subject import Subject
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.process_state import OUTSIDE, Scope, process_state


class Graph:
    """Stands for a CUDA graph: what it replays is set from outside."""

    body = staticmethod(lambda: None)

    def replay(self) -> None:
        self.body()

    def reset(self) -> None:
        del self.body


class Emulated(Graphed):
    """Its graphs run the callable, and write to memory that stays where it is."""

    def capture_forward(self) -> None:
        super().capture_forward()
        self.forward_graph.body = self._forward

    def capture_backward(self) -> None:
        super().capture_backward()
        if self.backward_graph is not None:
            self.gradients = tuple(None if g is None else g.clone() for g in self.gradients)
            self.backward_graph.body = self._backward

    def _forward(self) -> None:
        module = vars(self.subject.module or self)
        replaced = module.pop("forward", None)  # by what replays this
        with (
            autocast_stack().resumed(self.settings.scope),
            torch.enable_grad(),
            _weights_of_graphs(self.subject),
        ):
            self.fresh = self.run()
        if replaced is not None:
            module["forward"] = replaced
        with torch.no_grad():
            for own, new in zip(self.outputs, self.fresh, strict=True):
                own.copy_(new)

    def _backward(self) -> None:
        outputs = tuple(t for t in self.fresh if t.requires_grad)
        found = [g for g in self._gradients(outputs, self.grad_outputs) if g is not None]
        for own, new in zip([g for g in self.gradients if g is not None], found, strict=True):
            own.copy_(new)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes graphs of the package emulated ones until the end of a test."""

    @contextmanager
    def capture_into(settings, subject, what, graph):
        with autocast_stack().resumed(settings.scope):
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for module in (capture, graphed):
        monkeypatch.setattr(module, "capture_into", capture_into)


def graphs(
    functions, samples, recipe=None, order=None, cached: bool = False, hooks=None
) -> list[Graphed]:
    wanted = OUTSIDE if recipe is None else process_state().intern(Scope(True, False, recipe))
    settings = Settings(wanted, 2, False, None, None, cached, False, True)
    places = [f"callable {i}" for i in range(len(functions))]
    every = capture_time_hooks_of(hooks, places)
    subjects = [Subject(*one) for one in zip(functions, places, every, strict=True)]
    plan = CaptureOrder(len(functions), order)
    made = [
        Emulated(subjects[plan.function(i)], settings, args, kwargs)
        for i, (args, kwargs) in enumerate(samples)
    ]
    with state_restored(subjects):
        for one in made:
            one.warm_up()
        for subject in subjects:
            subject.record_states()
            if cached:
                capture_weights(subject, settings)
                subject.weights.body = lambda subject=subject: _cast(subject, wanted)
        for index, forward in plan.steps():
            (made[index].capture_forward if forward else made[index].capture_backward)()
        for subject in subjects:
            subject.drop_weights()
    return made


@contextmanager
def _weights_of_graphs(subject: Subject):
    """Lets layers read the memory of the capture, whatever eager calls have cached."""
    found = [(module.chain.matmuls[i], own) for module, i, own in subject.cached_weights]
    before = [stage.cached_weight for stage, _ in found]
    for stage, own in found:
        stage.cached_weight = own
    yield
    for (stage, _), other in zip(found, before, strict=True):
        stage.cached_weight = other


def _cast(subject: Subject, wanted: Scope) -> None:
    """Casts the weights into the memory of the capture."""
    with autocast_stack().resumed(wanted), _weights_of_graphs(subject):
        for module in subject.ours:
            module.renew_weights()
        for module, i, own in subject.cached_weights:
            own.take(module.chain.matmuls[i].cached_weight)


def sample(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32, requires_grad=True)
