"""Graphed callables on the CPU, where graphs are emulated: a replay runs the callable again."""

import copy
from contextlib import nullcontext

import pytest
import torch
from emulated_graphs import emulate, graphs, sample
from precisions import RECIPES, scope
from rulers import assert_equal
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cuda_graphs.callables import _replaced, _scopes
from transformer_engine.pytorch.cuda_graphs.order import CaptureOrder
from transformer_engine.pytorch.fp8.process_state import OUTSIDE

DELAYED = RECIPES["delayed"]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


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
    """Run steps of two micro-batches. The inputs are leaves, whose gradients add up."""
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


class Called(nn.Sequential):
    """Its `__call__` returns a tuple, its `forward` a tensor, as in Megatron's captured layers."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().__call__(x),)


def test_a_module_is_called_not_its_forward() -> None:
    model = nn.ModuleList([Called(*layers(1))])
    (part,) = graphs(model, [((sample(),), {})], DELAYED)
    x = sample()
    with scope("delayed"):
        (out,) = part(x)
        assert torch.equal(out, model[0](x)[0])


def test_keywords_that_say_nothing() -> None:
    """Megatron passes every keyword argument to each layer, most of them as None."""
    model = layers(1)
    (part,) = graphs(model, [((sample(),), {})], DELAYED)
    x = sample()
    with scope("delayed"):
        expected = model[0](x)
        assert torch.equal(part(x, is_first_microbatch=True, attention_mask=None), expected)


def test_orders() -> None:
    steps = CaptureOrder(4, [1, 2, -2, -1]).steps()
    assert steps == [
        *((i, True) for i in (0, 1, 2, 3)),
        *((i, False) for i in (3, 2, 1, 0)),
    ]
    assert [CaptureOrder(2, [1, 1, -1, -1]).function(i) for i in range(4)] == [0, 1, 0, 1]


def test_chunks_of_several_sizes() -> None:
    order = CaptureOrder(3, [1, 1, 2, 2, -2, -2, -1, -1], [1, 2])
    assert [order.function(i) for i in range(6)] == [0, 0, 1, 2, 1, 2]
    forwards = [graph for graph, forward in order.steps() if forward]
    backwards = [graph for graph, forward in order.steps() if not forward]
    assert forwards == [0, 1, 2, 3, 4, 5] and backwards == [3, 2, 5, 4, 0, 1]
    with pytest.raises(ValueError, match=r"for 4 callable\(s\) in chunks of \[1, 2\]"):
        CaptureOrder(4, [1, 2, -2, -1], [1, 2])


def test_fp8_for_some_callables() -> None:
    first, second = _scopes(2, (True, False), False, None, None)
    assert first.enabled and second is OUTSIDE
    with pytest.raises(ValueError, match=r"enabled for each of 3 callable\(s\), got \[True\]"):
        _scopes(3, [True], False, None, None)


class Block(nn.Module):
    """Its `forward` does not take `is_first_microbatch`, but a layer in it does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("wrap", [lambda layer: nn.Sequential(layer, nn.ReLU()), Block])
def test_containers_hand_on_which_micro_batch_it_is(wrap) -> None:
    eager = layers(2)
    other = nn.ModuleList(wrap(layer) for layer in copy.deepcopy(eager))
    samples = [((sample(),), {}) for _ in other]
    replayed = [_replaced(part) for part in graphs(other, samples, DELAYED, cached=True)]
    parts = [lambda x, layer=layer, **more: layer(x, **more).relu() for layer in eager]
    assert_equal(train(other, replayed, True, cached=True), train(eager, parts, True, cached=True))
    x = sample()
    other.eval()
    with torch.no_grad(), scope("delayed"):
        expected = eager[0](x, is_first_microbatch=True).relu()
        assert torch.equal(other[0](x, is_first_microbatch=True), expected)


def test_reset() -> None:
    """A module gets its own `forward` back; other graphed callables then run eagerly."""
    (module,) = layers(1)
    x = sample()
    with scope("delayed"):
        expected = module(x)
    before = dict(vars(module))
    (graph,) = graphs([module], [((sample(),), {})], DELAYED)
    assert _replaced(graph) is module
    assert vars(module) != before
    module.reset()
    assert "forward" not in vars(module) and "reset" not in vars(module)
    module.load_state_dict(module.state_dict())
    with scope("delayed"):
        assert torch.equal(graph(x), module(x))
    graph.reset()
    assert graph.outputs == () and expected.shape == graph(x).shape

    (function,) = graphs([torch.sin], [((sample(),), {})])
    y = function(x)
    function.reset()
    assert torch.equal(function(x), y)


def test_deep_copies_run_eagerly() -> None:
    """A copy computes with its own weights, and its `reset` does not reset the graphs."""
    (module,) = layers(1)
    (graph,) = graphs([module], [((sample(),), {})], DELAYED)
    _replaced(graph)
    copied = copy.deepcopy(copy.deepcopy(module))
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    x = sample()
    with scope("delayed"):
        assert not copied(x).any() and module(x).any()
    copied.reset()
    assert not graph.was_reset and "forward" in vars(module)


def test_hooks_of_the_capture_run_around_it_alone() -> None:
    """They may replace parameters, such as a shard by the whole weight; replays do not run them."""
    module = nn.Linear(32, 8)
    shard, whole = module.weight, nn.Parameter(torch.full_like(module.weight, 2.0))
    calls = []

    def install(weight, what):
        def hook(*args):
            calls.append((what, len(args)))
            module.weight = weight

        return hook

    hooks = {
        "forward_pre_hooks": {0: install(whole, "before forward")},
        "forward_hooks": {"a": install(shard, "after forward")},
        "forward_hooks_with_kwargs": {"a": True},
        "backward_pre_hooks": {0: install(whole, "before backward")},
        "backward_hooks": {0: install(shard, "after backward")},
    }
    (graph,) = graphs([module], [((sample(),), {})], hooks=[hooks])
    names = [("before forward", 2), ("after forward", 4), ("before backward", 2)]
    assert calls == [*names, ("after backward", 3)] * 3, "two warm-ups and the capture"
    assert module.weight is shard
    x = sample()
    module.weight = whole  # emulated replays use the current weight, CUDA graphs its address
    graph(x).sum().backward()
    assert len(calls) == 12
    assert shard.grad is None
    assert torch.equal(whole.grad, x.detach().sum(0).expand(8, -1))
    for wrong, error, message in (
        ([hooks, None], ValueError, r"for each of 1 callable\(s\), got 2"),
        ([[1]], TypeError, "a mapping or None for each callable, got list for callable 0"),
        ([{"hooks": {}}], ValueError, "got 'hooks' for callable 0"),
        ([{"forward_hooks": {0: lambda *a: 1}}], ValueError, "expected hooks of a capture"),
    ):
        with pytest.raises(error, match=message):
            graphs([module], [((sample(),), {})], hooks=wrong)
