"""CudaRNGStatesTracker: names, seeds, forks; initialisation and dropout draw from it."""

import copy

import pytest
import torch
from cases.attention import BACKENDS
from cases.attention import module as make_attention
from cases.attention import qkv as make_qkv

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch import rng as rng_module


@pytest.fixture
def tracker(device):
    made = te.CudaRNGStatesTracker(device=device)
    made.add("model-parallel-rng", 11)
    return made


def expected(device, seed, count):
    """The first `count` draws of three numbers after seeding."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.rand(3, generator=generator, device=device) for _ in range(count)]


def default_state(device):
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


def plain(states):
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in states.items()
    }


def test_documented_path_and_default_device():
    assert distributed.CudaRNGStatesTracker is te.CudaRNGStatesTracker
    tracker = te.CudaRNGStatesTracker()
    tracker.add("a", 1)
    kind = torch.Generator if torch.cuda.is_available() else torch.Tensor
    assert isinstance(tracker.get_states()["a"], kind)
    assert distributed.graph_safe_rng_available() >= torch.cuda.is_available()


def test_fork_goes_on_where_it_stopped(device, tracker):
    before = default_state(device)
    first, second, third = expected(device, 11, 3)
    with tracker.fork():
        assert torch.equal(torch.rand(3, device=device), first)
    assert torch.equal(default_state(device), before)
    with tracker.fork("model-parallel-rng"):
        assert torch.equal(torch.rand(3, device=device), second)
        assert torch.equal(torch.rand(3, device=device), third)
    assert torch.equal(default_state(device), before)


def test_default_draws_are_as_without_a_fork(device, tracker):
    torch.manual_seed(5)
    alone = torch.rand(6, device=device)
    torch.manual_seed(5)
    with tracker.fork():
        torch.rand(9, device=device)
    assert torch.equal(torch.rand(6, device=device), alone)


def test_nested_forks_never_repeat_numbers(device, tracker):
    tracker.add("other", 12)
    before = default_state(device)
    draws = {"model-parallel-rng": [], "other": []}

    def draw(name):
        draws[name].append(torch.rand(3, device=device))

    with tracker.fork():
        draw("model-parallel-rng")
        with tracker.fork("other"):
            draw("other")
            with tracker.fork():
                draw("model-parallel-rng")
            draw("other")
        draw("model-parallel-rng")
        with tracker.fork():
            draw("model-parallel-rng")
        draw("model-parallel-rng")
    assert torch.equal(default_state(device), before)
    for name, seed in (("model-parallel-rng", 11), ("other", 12)):
        assert torch.equal(
            torch.stack(draws[name]), torch.stack(expected(device, seed, len(draws[name])))
        )


def test_an_error_inside_restores_the_default(device, tracker):
    before = default_state(device)
    with pytest.raises(RuntimeError, match="mine"), tracker.fork():
        torch.rand(3, device=device)
        raise RuntimeError("mine")
    assert torch.equal(default_state(device), before)
    with tracker.fork():
        assert torch.equal(torch.rand(3, device=device), expected(device, 11, 2)[1])


def test_states_travel(device, tracker):
    saved = {name: state.clone() for name, state in plain(tracker.get_states()).items()}
    with tracker.fork():
        torch.rand(3, device=device)
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(torch.rand(3, device=device), expected(device, 11, 1)[0])

    other = te.CudaRNGStatesTracker(device=device)
    other.set_states(tracker.get_states())
    assert other.states_.keys() == {"model-parallel-rng"}
    with other.fork():
        assert torch.equal(torch.rand(3, device=device), expected(device, 11, 2)[1])


def test_get_states_is_a_copy_of_the_mapping(device, tracker):
    states = tracker.get_states()
    assert states["model-parallel-rng"] is tracker.states_["model-parallel-rng"]
    states.clear()
    assert tracker.states_


def test_reset_forgets(device, tracker):
    assert tracker.seeds_ == {11}
    tracker.reset()
    assert (tracker.states_, tracker.seeds_) == ({}, set())
    tracker.add("model-parallel-rng", 11)


def test_reset_inside_a_fork(device, tracker):
    before = default_state(device)
    with tracker.fork():
        tracker.reset()
    assert not tracker.states_
    assert torch.equal(default_state(device), before)


def test_taken_names_and_seeds_are_refused(tracker):
    with pytest.raises(ValueError, match="seed 11 already exists"):
        tracker.add("other", 11)
    with pytest.raises(ValueError, match="cuda rng state model-parallel-rng already exists"):
        tracker.add("model-parallel-rng", 12)
    assert tracker.seeds_ == {11}


def test_seeds_are_ints(tracker):
    with pytest.raises(TypeError, match=r"expected seed to be an int, got 'x' \(state other\)"):
        tracker.add("other", "x")


def test_unknown_names_list_the_known(tracker):
    with (
        pytest.raises(KeyError, match=r"state data is not added: known are 'model-parallel-rng'"),
        tracker.fork("data"),
    ):
        pass
    tracker.reset()
    with pytest.raises(KeyError, match="known are none"), tracker.fork():
        pass


def test_what_is_no_state_is_refused(tracker):
    with pytest.raises(TypeError, match="expected a mapping"):
        tracker.set_states([1])
    with pytest.raises(TypeError, match="for state a, got int"):
        tracker.set_states({"a": 1})
    with pytest.raises(ValueError, match="expected device"):
        te.CudaRNGStatesTracker(device="meta")


class Subclass(te.CudaRNGStatesTracker):
    """Extends the tracker as large trainers do."""

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        super().reset()
        self.initialised = False

    def set_states(self, states):
        super().set_states(states)
        self.initialised = True


def test_subclasses_of_clients():
    tracker = Subclass()
    tracker.add("a", 3)
    tracker.set_states(tracker.get_states())
    assert tracker.initialised
    with tracker.fork("a"):
        pass


MODULES = {
    "Linear": lambda **more: te.Linear(16, 32, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(16, 32, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(16, 32, **more),
    "MultiheadAttention": lambda **more: te.MultiheadAttention(32, 2, **more),
    "TransformerLayer": lambda **more: te.TransformerLayer(32, 64, 2, **more),
}


@pytest.mark.parametrize("kind", MODULES)
def test_initialisation_draws_from_the_fork(device, kind):
    def weights(outer_seed):
        torch.manual_seed(outer_seed)
        tracker = te.CudaRNGStatesTracker(device=device)
        tracker.add("model-parallel-rng", 7)
        before = default_state(device)
        module = MODULES[kind](device=device, get_rng_state_tracker=lambda: tracker)
        assert torch.equal(default_state(device), before)
        return list(module.parameters()), plain(tracker.get_states())

    (first, state), (second, again) = weights(1), weights(2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(state["model-parallel-rng"], again["model-parallel-rng"])
    fresh = torch.Generator(device).manual_seed(7).get_state()
    assert not torch.equal(state["model-parallel-rng"], fresh)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_dropout_draws_from_the_fork(device, tracker, backend, monkeypatch):
    for name, value in BACKENDS[backend].items():
        monkeypatch.setenv(name, value)
    inputs = make_qkv(device)
    module = make_attention(attention_dropout=0.4, get_rng_state_tracker=lambda: tracker)
    start = {name: state.clone() for name, state in plain(tracker.get_states()).items()}
    before = default_state(device)
    first, second = module(*inputs), module(*inputs)
    assert torch.equal(default_state(device), before)
    assert not torch.equal(first, second)
    tracker.set_states(start)
    torch.manual_seed(77)
    assert torch.equal(module(*inputs), first)
    assert torch.equal(module(*inputs), second)


def test_layer_draws_attention_dropout_alone_from_the_fork(device, tracker):
    x = torch.randn(4, 2, 32, device=device)
    layer = te.TransformerLayer(
        32, 64, 2, device=device, hidden_dropout=0.0, get_rng_state_tracker=lambda: tracker
    )
    before = default_state(device)
    layer(x).sum().backward()
    assert torch.equal(default_state(device), before)


@pytest.mark.parametrize("times", [1, 2])
def test_recomputed_dropout_is_that_of_the_forward(device, times, monkeypatch):
    for name, value in BACKENDS["unfused"].items():
        monkeypatch.setenv(name, value)
    inputs = make_qkv(device)
    results = []
    for checkpoint in (False, True):
        tracker = te.CudaRNGStatesTracker(device=device)
        tracker.add("model-parallel-rng", 7)
        module = make_attention(attention_dropout=0.3, get_rng_state_tracker=lambda t=tracker: t)
        out = module(*inputs, checkpoint_core_attention=checkpoint)
        with tracker.fork():
            torch.rand(5, device=device)  # what the model draws between forward and backward
        for _ in range(times):
            grads = torch.autograd.grad(out.sum() + (out * out).sum(), inputs, retain_graph=True)
        results.append([out.detach(), *grads, *plain(tracker.get_states()).values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_backward_inside_a_fork_of_the_same_name(device, tracker, monkeypatch):
    for name, value in BACKENDS["unfused"].items():
        monkeypatch.setenv(name, value)
    inputs = make_qkv(device)
    module = make_attention(attention_dropout=0.3, get_rng_state_tracker=lambda: tracker)
    start = {name: state.clone() for name, state in plain(tracker.get_states()).items()}
    wanted = torch.autograd.grad(module(*inputs).sum(), inputs)
    after = plain(tracker.get_states())["model-parallel-rng"].clone()
    following = torch.Generator(device).set_state(after)
    tracker.set_states(start)
    out = module(*inputs, checkpoint_core_attention=True).sum()
    with tracker.fork():
        drawn = [torch.rand(3, device=device)]
        got = torch.autograd.grad(out, inputs)
        drawn.append(torch.rand(3, device=device))
    with tracker.fork():
        drawn.append(torch.rand(3, device=device))
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)
    for numbers in drawn:
        assert torch.equal(numbers, torch.rand(3, generator=following, device=device))


def test_states_set_inside_a_fork_hold(device, tracker):
    with tracker.fork():
        tracker.set_states(
            {
                "model-parallel-rng": torch.Generator(device).manual_seed(4).get_state()
                if device == "cpu"
                else torch.Generator(device).manual_seed(4)
            }
        )
        torch.rand(3, device=device)
    with tracker.fork():
        assert torch.equal(torch.rand(3, device=device), expected(device, 4, 1)[0])


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Replays draw the numbers of eager calls, from the registered and from the default state."""
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), tracker.fork():
        torch.rand(1024, device="cuda")
    torch.cuda.synchronize()
    start = tracker.states_["model-parallel-rng"].get_state()
    graph = torch.cuda.CUDAGraph()
    tracker.register_with(graph)
    with torch.cuda.graph(graph, stream=side):
        with tracker.fork():
            drawn = torch.rand(1024, device="cuda")
        outside = torch.rand(1024, device="cuda")
    torch.cuda.synchronize()  # torch writes the seeds of a capture on its stream, here `side`
    tracker.set_states({"model-parallel-rng": start})
    torch.manual_seed(9)
    captured = []
    for _ in range(3):
        graph.replay()
        captured.append((drawn.clone(), outside.clone()))
    tracker.set_states({"model-parallel-rng": start})
    torch.manual_seed(9)
    for inside, default in captured:
        with tracker.fork():
            assert torch.equal(torch.rand(1024, device="cuda"), inside)
        assert torch.equal(torch.rand(1024, device="cuda"), default)


@pytest.mark.gpu
def test_attention_dropout_in_a_cuda_graph(monkeypatch):
    for name, value in BACKENDS["unfused"].items():
        monkeypatch.setenv(name, value)
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    inputs = make_qkv("cuda", torch.bfloat16, (128, 2, 4, 64), grad=False)
    module = make_attention(
        kv_channels=64, attention_dropout=0.3, get_rng_state_tracker=lambda: tracker
    )
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            module(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    tracker.register_with(graph)
    with torch.cuda.graph(graph, stream=side):
        out = module(*inputs)
    start = tracker.states_["model-parallel-rng"].get_state()
    graph.replay()
    first = out.clone()
    graph.replay()
    second = out.clone()
    tracker.set_states({"model-parallel-rng": start})
    assert torch.equal(module(*inputs), first)
    assert torch.equal(module(*inputs), second)
    assert not torch.equal(first, second)


def test_deepcopy_of_a_cpu_tracker():
    tracker = te.CudaRNGStatesTracker(device="cpu")
    tracker.add("a", 1)
    other = copy.deepcopy(tracker)
    with tracker.fork("a"):
        one = torch.rand(3)
    with other.fork("a"):
        assert torch.equal(torch.rand(3), one)


def test_states_of_all_trackers(device, tracker):
    other = te.CudaRNGStatesTracker(device=device)
    other.add("of another tracker", 12)
    states = distributed.get_all_rng_states()
    assert {"model-parallel-rng", "of another tracker"} <= set(states)
    before = rng_module.snapshot(states)
    with other.fork("of another tracker"):
        first = torch.rand(3, device=device)
    with tracker.fork():
        torch.rand(3, device=device)
    distributed.set_all_rng_states(before)
    assert plain(tracker.get_states()).keys() == {"model-parallel-rng"}
    with other.fork("of another tracker"):
        assert torch.equal(torch.rand(3, device=device), first)
    with tracker.fork():
        assert torch.equal(torch.rand(3, device=device), expected(device, 11, 1)[0])
