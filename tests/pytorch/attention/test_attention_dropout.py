"""DotProductAttention: dropout, its random numbers, recomputation, CUDA graphs."""

from contextlib import contextmanager

import pytest
import torch
from cases.attention import BACKENDS
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv

from transformer_engine.pytorch.attention import attention_backends


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    for name, value in BACKENDS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.fixture
def unfused(monkeypatch):
    for name, value in BACKENDS["unfused"].items():
        monkeypatch.setenv(name, value)


class Tracker:
    """An RNG state tracker with the documented methods and one state."""

    def __init__(self, seed, device):
        self.device = device
        self.state = torch.Generator(device).manual_seed(seed).get_state()

    def get_states(self):
        return self.state.clone()

    def set_states(self, state):
        self.state = state.clone()

    def _default(self):
        return torch.default_generator if self.device == "cpu" else torch.cuda.default_generators[0]

    @contextmanager
    def fork(self):
        generator = self._default()
        outside = generator.get_state()
        generator.set_state(self.state)
        yield
        self.state = generator.get_state()
        generator.set_state(outside)


def _run(module, inputs, **arguments):
    out = module(*inputs, **arguments)
    grads = torch.autograd.grad(out.sum() + (out * out).sum(), inputs)
    return [out.detach(), *grads]


def test_dropout_drops_in_training_only(device, backend):
    q, k, _ = make_qkv(device)
    v = torch.ones_like(q)
    module = make_module(attention_dropout=0.5, attn_mask_type="no_mask")
    out = module(q, k, v)
    assert not torch.allclose(out, torch.ones_like(out))
    torch.testing.assert_close(out.mean(), torch.ones((), device=device), rtol=0.3, atol=0)
    assert torch.allclose(module.eval()(q, k, v), torch.ones_like(out))


def test_all_weights_dropped(device):
    """Backends whose kernels divide by 1 - p refuse p = 1, so unfused attention runs."""
    module = make_module(attention_dropout=1.0)
    for found in _run(module, make_qkv(device)):
        assert int(found.count_nonzero()) == 0
    table = attention_backends(attention_dropout=1.0, device=device)
    assert table.chosen == "unfused" and "attention_dropout < 1" in table["sdpa"]


def test_dropout_draws_from_the_tracker(device, unfused):
    inputs = make_qkv(device)
    tracker = Tracker(5, device)
    arguments = {"attention_dropout": 0.4, "get_rng_state_tracker": lambda: tracker}
    first = make_module(**arguments)(*inputs)
    torch.manual_seed(99)
    before = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    second = make_module(**arguments)(*inputs)
    after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(before, after)
    assert not torch.equal(first, second)
    tracker.set_states(Tracker(5, device).get_states())
    assert torch.equal(make_module(**arguments)(*inputs), first)
    make_module(**arguments, sequence_parallel=True)(*inputs)  # uses the default generator
    assert not torch.equal(
        torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(), before
    )


@pytest.mark.parametrize("with_tracker", [False, True])
def test_recomputed_attention_is_bitwise_the_same(device, unfused, with_tracker):
    inputs = make_qkv(device)
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(3)
        tracker = Tracker(7, device) if with_tracker else None
        get_tracker = (lambda t=tracker: t) if with_tracker else None
        module = make_module(attention_dropout=0.3, get_rng_state_tracker=get_tracker)
        run = _run(module, inputs, checkpoint_core_attention=checkpoint)
        after = torch.rand(3, device=device)
        states = tracker.get_states() if with_tracker else None
        results.append((run, after, states))
    (plain, random, states), (again, random_again, states_again) = results
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(random, random_again)
    assert not with_tracker or torch.equal(states, states_again)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["no_bias", "alibi"])
def test_in_a_cuda_graph(bias):
    inputs = make_qkv("cuda", torch.bfloat16, (128, 2, 4, 64))
    module = make_module(kv_channels=64)
    arguments = {"core_attention_bias_type": bias}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            _run(module, inputs, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = _run(module, inputs, **arguments)
    graph.replay()
    for a, b in zip(captured, _run(module, inputs, **arguments), strict=True):
        torch.testing.assert_close(a, b)
