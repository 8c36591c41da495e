"""What happens around the replay of a graph, on the CPU: "replays" run the callable again."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from precisions import RECIPES, scope
from rulers import assert_equal
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cuda_graphs import graphed
from transformer_engine.pytorch.cuda_graphs.callables import _Order, _replaced
from transformer_engine.pytorch.cuda_graphs.graphed import Graphed, Settings, Subject, untouched
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.process_state import OUTSIDE, Scope, process_state

DELAYED = RECIPES["delayed"]


class Graph:
    """Stands for a CUDA graph: what it replays is set from outside."""

    body = staticmethod(lambda: None)

    def replay(self) -> None:
        self.body()


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
        with autocast_stack().resumed(self.settings.scope), torch.enable_grad():
            self.fresh = self.run()
        with torch.no_grad():
            for own, new in zip(self.outputs, self.fresh, strict=True):
                own.copy_(new)

    def _backward(self) -> None:
        outputs = tuple(t for t in self.fresh if t.requires_grad)
        found = self._gradients(outputs, self.grad_outputs)
        for own, new in zip(self.gradients, found, strict=True):
            if own is not None:
                own.copy_(new)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    @contextmanager
    def capture_into(settings, subject, what, graph):
        with autocast_stack().resumed(settings.scope):
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphed, "capture_into", capture_into)


def graphs(functions, samples, recipe=None, order=None, cached: bool = False) -> list[Graphed]:
    wanted = OUTSIDE if recipe is None else process_state().intern(Scope(True, False, recipe))
    settings = Settings(wanted, 2, False, None, None, cached, False, True)
    subjects = [Subject(f, f"callable {i}") for i, f in enumerate(functions)]
    plan = _Order(len(functions), order)
    made = [
        Emulated(subjects[plan.function(i)], settings, args, kwargs)
        for i, (args, kwargs) in enumerate(samples)
    ]
    with untouched(subjects):
        for one in made:
            one.warm_up()
        for subject in subjects:
            subject.record_states()
            if cached:
                subject.capture_weights(settings)
                subject.weights.body = lambda subject=subject: _cast(subject, wanted)
        for index, forward in plan.steps():
            (made[index].capture_forward if forward else made[index].capture_backward)()
    return made


def _cast(subject: Subject, wanted: Scope) -> None:
    with autocast_stack().resumed(wanted):
        for module in subject.ours:
            module.renew_weights()


def sample(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32, requires_grad=True)


def layers(number: int = 2, **more) -> nn.ModuleList:
    torch.manual_seed(0)
    factory = {"device": "cpu", "params_dtype": torch.float32, **more}
    return nn.ModuleList(te.LayerNormMLP(32, 64, **factory) for _ in range(number))


def everything(model: nn.Module) -> list[torch.Tensor]:
    states = [s for m in model.modules() for s in getattr(m, "scaling", {}).values()]
    return [
        *(p.grad for p in model.parameters() if p.grad is not None),
        *(p.main_grad for p in model.parameters() if hasattr(p, "main_grad")),
        *(t for s in states for t in (s.scale, s.amax_history)),
    ]


def train(model, parts, fp8: bool, cached: bool = False, around: bool = True):
    """Steps of two micro-batches whose inputs are leaves; their gradients add up."""
    torch.manual_seed(1)
    found, xs = [], [sample() for _ in range(2)]
    for _ in range(3):
        for i, x in enumerate(xs):
            more = {"is_first_microbatch": i == 0} if cached else {}
            y = x
            with scope("delayed") if fp8 and around else nullcontext():
                for part in parts:
                    y = part(y, **more)
            y.square().mean().backward()
            found += [y.detach().clone(), x.grad.clone(), *(t.clone() for t in everything(model))]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    return found


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_equal_to_eager(fp8: bool, cached: bool, fused: bool) -> None:
    eager = layers(fuse_wgrad_accumulation=fused)
    for p in eager.parameters() if fused else ():
        p.main_grad = torch.zeros_like(p)
    other = copy.deepcopy(eager)
    for p in other.parameters() if fused else ():
        p.main_grad = torch.zeros_like(p)
    cached = cached and fp8
    recipe = DELAYED if fp8 else None
    parts = graphs(other, [((sample(),), {}) for _ in other], recipe, cached=cached)
    replayed = [_replaced(part) for part in parts]
    assert replayed == list(other)
    expected = train(eager, eager, fp8, cached)
    assert_equal(train(other, replayed, fp8, cached), expected)


def test_a_replay_outside_of_an_autocast_ends_the_step_itself() -> None:
    eager = layers(1)
    other = copy.deepcopy(eager)
    (part,) = graphs(other, [((sample(),), {})], DELAYED)
    assert_equal(train(other, [part], True, around=False), train(eager, eager, True))


def test_micro_batches_in_a_pipeline() -> None:
    eager = layers()
    other = copy.deepcopy(eager)
    order = [1, 2, 1, 2, -2, -1, -2, -1]
    parts = graphs(other, [((sample(),), {}) for _ in range(4)], DELAYED, order)
    xs = [sample() for _ in range(2)]
    found = []
    for model, first, second in (
        (eager, (eager[0],) * 2, (eager[1],) * 2),
        (other, parts[:2], parts[2:]),
    ):
        for _ in range(3):
            with scope("delayed"):
                outs = [second[i](first[i](xs[i])) for i in range(2)]
            for out in outs:
                out.sum().backward()
        found.append([*(x.grad for x in xs), *(t.clone() for t in everything(model))])
        for x in xs:
            x.grad = None
    assert_equal(found[1], found[0])


def test_what_is_refused() -> None:
    model = layers(1)
    (part,) = graphs(model, [((sample(),), {})], DELAYED, cached=True)
    with pytest.raises(TypeError, match="expected is_first_microbatch in every call"):
        part(sample())
    with pytest.raises(ValueError, match=r"argument 0 of callable 0 as it was captured"):
        part(sample(32), is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="expected callable 0 outside of checkpoints"):
        te.checkpoint(lambda x: part(x, is_first_microbatch=True), sample()).sum().backward()
    model[0].set_extra_state(model[0].get_extra_state())
    with pytest.raises(RuntimeError, match=r"FP8 state of layer .* capture again"):
        part(sample(), is_first_microbatch=True)


def test_orders() -> None:
    steps = _Order(4, [1, 2, -2, -1]).steps()
    assert steps == [
        *((i, True) for i in (0, 1, 2, 3)),
        *((i, False) for i in (3, 2, 1, 0)),
    ]
    assert [_Order(2, [1, 1, -1, -1]).function(i) for i in range(4)] == [0, 1, 0, 1]
