"""`get_cpu_offload_context` keeps saved tensors on the host and changes no bit of the results."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_copies import Memory
from rulers import assert_equal
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.offload import offload as module
from transformer_engine.pytorch.offload.offload import CudaCopies, Offload

RECIPE = DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 64)


def model(layers: int, device: str = "cpu") -> nn.ModuleList:
    torch.manual_seed(0)
    factory = {"device": device, "params_dtype": torch.float32}
    return nn.ModuleList(te.LayerNormMLP(32, 64, **factory) for _ in range(layers))


def train(layers: nn.ModuleList, wrap, steps: int = 3, fp8: bool = True) -> list[torch.Tensor]:
    """Train; `wrap` is a context and the function that is called after each layer."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(16, 32).to(next(layers.parameters()).device).requires_grad_()
        y = x
        context, synchronize = wrap
        with te.fp8_autocast(enabled=fp8, fp8_recipe=RECIPE):
            for layer in layers:
                with context:
                    y = layer(y)
                y = synchronize(y)
        layers.zero_grad()
        y.square().mean().backward()
        found += [y.detach(), x.grad, *(p.grad for p in layers.parameters())]
    return found


def plain(layers: int, **more) -> list[torch.Tensor]:
    return train(model(layers), te.get_cpu_offload_context(enabled=False), **more)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_no_bit_changes(number: int, weights: bool, fp8: bool) -> None:
    memory = Memory()
    offload = Offload(number, None, True, weights, memory)
    assert_equal(train(model(5), (offload, offload.synchronize), fp8=fp8), plain(5, fp8=fp8))
    gc.collect()
    assert memory.alive == 0
    outs, backs = memory.done.count("out"), memory.done.count("back")
    # Tensors of the last layer are needed at once. The first step does not know the last layer yet.
    assert outs == (3 * number if number < 5 else 5 + 4 + 4)
    assert backs == (3 * number if number < 5 else 12)


def test_copies_are_spread_over_the_layers() -> None:
    memory = Memory()
    offload = Offload(2, 6, True, True, memory)
    assert [offload.due(i) for i in range(2)] == [3, 5]
    full = Offload(6, 6, True, True, memory)
    assert [full.due(i) for i in range(6)] == [1, 2, 3, 4, 5, 6]
    train(model(6), (offload, offload.synchronize), steps=1)
    there = ["out", "out", "wait out", "wait out"]  # after layers 0, 1, 3, 5
    back = ["back", "back", "wait back", "wait back"]  # before the backwards of 5, 3, 1, 0
    assert memory.done == there + back


def test_what_is_offloaded() -> None:
    bytes_of = {}
    for activations, weights in ((True, True), (True, False), (False, True)):
        memory = Memory()
        offload = Offload(1, 2, activations, weights, memory)
        y = torch.ones(16, 32, requires_grad=True) * 1.0
        with te.fp8_autocast(fp8_recipe=RECIPE):
            for layer in model(2):
                with offload:
                    y = layer(y)
                offload.synchronize()
        bytes_of[activations, weights] = memory.alive
        y.sum().backward()
    codes = 2 * 32 * 64
    others = 4 * 16 * (32 + 64 + 64) // 2  # at least half of the bytes of saved activations
    assert bytes_of[False, True] == codes
    assert bytes_of[True, False] >= others
    assert bytes_of[True, True] == bytes_of[True, False] + codes


def test_one_of_both_must_be_offloaded() -> None:
    with pytest.raises(ValueError, match="expected offload_activations or offload_weights"):
        te.get_cpu_offload_context(True, 1, False, False)


def test_a_call_without_the_output_and_two_backwards() -> None:
    memory = Memory()
    offload = Offload(2, None, True, True, memory)
    layers, x = model(3), torch.randn(16, 32, requires_grad=True)
    found = []
    for on in (False, True):
        y = x
        for layer in layers:
            with offload if on else torch.enable_grad():
                y = layer(y)
            if on:
                offload.synchronize()
        found += [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_forward_without_a_backward() -> None:
    memory = Memory()
    offload = Offload(2, 4, True, True, memory)
    layers = model(4)
    for _ in range(2):
        y = torch.randn(16, 32, requires_grad=True)
        for layer in layers:
            with offload:
                y = layer(y)
            offload.synchronize()
        del y
        gc.collect()
    assert memory.alive == 0 and memory.done.count("out") == 4
    with torch.no_grad(), offload:
        layers[0](torch.randn(16, 32))
        offload.synchronize()
    assert_equal(train(model(4), (offload, offload.synchronize)), plain(4))


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_checkpoints(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return te.checkpoint(self.inner, x, use_reentrant=reentrant)

    memory = Memory()
    offload = Offload(2, None, True, True, memory)
    layers = nn.ModuleList(Checkpointed(layer) for layer in model(4))
    assert_equal(train(layers, (offload, offload.synchronize)), plain(4))
    assert "back" in memory.done


def test_views_share_one_copy() -> None:
    class Views(nn.Module):
        def forward(self, x):
            a, b = (x * 2).chunk(2, dim=-1)
            return torch.cat([a * b, (a * b).t().exp().t()], dim=-1)

    memory = Memory()
    offload = Offload(1, 2, True, True, memory)
    x = torch.randn(4, 32, requires_grad=True)
    found = []
    for on in (False, True):
        y = x
        for _ in range(2):
            with offload if on else torch.enable_grad():
                y = Views()(y)
            offload.synchronize()
        if on:
            assert memory.alive == 4 * 4 * (32 + 16)  # `x * 2` and the result of `exp`
        found.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("part", [torch.conj, lambda y: y.conj().imag], ids=["conj", "neg"])
def test_bits_beside_the_memory(part) -> None:
    """Conjugates and negatives are views that differ from their base only by a flag."""
    offload = Offload(1, 2, True, True, Memory())
    x = torch.randn(4, 32, dtype=torch.complex64, requires_grad=True)
    found = []
    for on in (False, True):
        with offload if on else nullcontext():
            y = part(x * 1j) * part(x)
        offload.synchronize()
        with offload if on else nullcontext():
            y = y * 2
        offload.synchronize()
        found.append(torch.autograd.grad(y.abs().sum(), x)[0])
    assert torch.equal(*found)


def test_in_place_changes_are_refused() -> None:
    offload = Offload(1, 2, True, True, Memory())
    x = torch.randn(4, 32, requires_grad=True)
    with offload:
        y = x * 2
        z = y * y
    offload.synchronize()
    with offload:
        y.zero_()
        z * 2
    with pytest.raises(RuntimeError, match="in-place operation has changed"):
        offload.synchronize()


def test_marked_tensors_stay() -> None:
    memory = Memory()
    offload = Offload(1, 2, True, True, memory)
    x = torch.randn(4, 32, requires_grad=True)
    stays = torch.randn(4, 32)
    te.mark_not_offload(stays)
    with offload:
        x * stays
    offload.synchronize()
    assert memory.done == []


def test_parameters_stay() -> None:
    """`nn.Linear` saves a view of its weight."""
    memory = Memory()
    offload = Offload(1, 2, True, True, memory)
    x, layer = torch.randn(4, 32, requires_grad=True), nn.Linear(32, 32)
    with offload:
        y = layer(x)
    offload.synchronize()
    assert y.grad_fn is not None and memory.alive == x.nbytes


def test_on_the_cpu_nothing_happens(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=2)
    assert_equal(train(model(3), (context, synchronize)), plain(3))
    x = torch.ones(3)
    assert synchronize(x) is x and synchronize() is None


def test_a_context_says_whether_it_is_open() -> None:
    """Megatron-Core reads `inside_context`, which an error must also reset."""
    context = Offload(1, 2, True, True, Memory())
    assert context.inside_context is False
    for error in (None, RuntimeError):
        with pytest.raises(error) if error else nullcontext(), context:
            assert context.inside_context is True
            if error:
                raise error
        assert context.inside_context is False


@pytest.mark.parametrize("enabled", [False, True])
def test_a_context_that_does_nothing_compiles(enabled: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    context: Any
    context, synchronize = te.get_cpu_offload_context(enabled=enabled)
    assert context.inside_context is False

    @torch.compile(fullgraph=True, backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        with context:
            y = x * 2
        return synchronize(y)

    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))


def test_errors() -> None:
    with pytest.raises(ValueError, match="model_layers >= 3, got 2"):
        te.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=2)
    with pytest.raises(ValueError, match="num_layers >= 1, got 0"):
        te.get_cpu_offload_context(enabled=True, num_layers=0)
    with pytest.raises(TypeError, match=r"^\[mark_not_offload\] expected tensors .*, got int$"):
        te.mark_not_offload(torch.ones(2), 3)
    with pytest.raises(TypeError, match="num_layers to be an int, got '2'"):
        te.get_cpu_offload_context(enabled=True, num_layers="2")
    with pytest.raises(TypeError, match=r"model_layers to be an int, got 2\.5"):
        te.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=2.5)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_transformer_layers(number: int, precision: str, monkeypatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setattr(module, "LEAST_BYTES", 16 * 1024)

    def run(wrap) -> tuple[list[torch.Tensor], int]:
        reset_autocast()
        torch.manual_seed(0)
        layers = nn.ModuleList(
            te.TransformerLayer(1024, 4096, 16, params_dtype=torch.bfloat16) for _ in range(4)
        )
        torch.manual_seed(1)
        found, peak = [], 0
        for _ in range(3):
            x = torch.randn(512, 4, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            layers.zero_grad()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = x
            with te.fp8_autocast(enabled=precision == "fp8", fp8_recipe=RECIPE):
                for layer in layers:
                    with wrap[0]:
                        y = layer(y)
                    y = wrap[1](y)
            peak = torch.cuda.memory_allocated() - before
            y.float().square().mean().backward()
            found += [y.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())]
        return found, peak

    expected, without = run(te.get_cpu_offload_context(enabled=False))
    found, peak = run(te.get_cpu_offload_context(enabled=True, num_layers=number))
    assert_equal(found, expected)
    gone = min(number, 3) / 4
    assert peak < without * (1 - 0.7 * gone)


@pytest.mark.gpu
def test_cuda_copies_come_back() -> None:
    copies = CudaCopies()
    sources = [torch.randint(255, (n,), dtype=torch.uint8, device="cuda") for n in (7, 1 << 22)]
    for _ in range(3):
        hosts, left = copies.out(sources)
        copies.wait(left)
        found, came = copies.back(hosts, [s.device for s in sources])
        copies.wait(came)
        assert_equal(found, sources)
        assert all(host.is_pinned() for host in hosts)
        for host in hosts:
            copies.free(host)
