"""`get_cpu_offload_context(manual_synchronization=True)`: the caller starts the copies."""

import gc
from collections.abc import Callable

import pytest
import torch
from fake_copies import Memory
from rulers import assert_equal
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context
from transformer_engine.pytorch.offload import offload as schedule
from transformer_engine.pytorch.offload.manual import ManualOffload, ManualOffloadSynchronizer

LAYERS = 3
RECIPE = DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(te.LayerNormMLP(32, 64, device="cpu") for _ in range(LAYERS))


class Run:
    """A forward of all layers of a model in a context."""

    def __init__(self, layers: nn.ModuleList, offload: ManualOffload | None, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(16, 32, generator=generator).requires_grad_()
        self.y = self.x
        with te.fp8_autocast(fp8_recipe=RECIPE):
            for layer in layers:
                if offload is None:
                    self.y = layer(self.y)
                    continue
                with offload:
                    self.y = layer(self.y)
                self.y = offload.synchronize(self.y)

    def backward(self) -> torch.Tensor:
        self.y.square().sum().backward()
        del self.y
        assert self.x.grad is not None
        return self.x.grad


def manual(
    model_layers: int | None = None,
) -> tuple[Memory, ManualOffload, ManualOffloadSynchronizer]:
    memory = Memory()
    offload = ManualOffload(model_layers, True, True, memory)
    return memory, offload, ManualOffloadSynchronizer(offload)


def test_layers_that_the_caller_names_are_moved() -> None:
    memory, offload, controls = manual()
    plain, layers = model(), model()
    for step in range(3):
        expected, run = Run(plain, None, step), Run(layers, offload, step)
        assert memory.done == []
        for layer in (0, 2):
            controls.start_offload_layer(layer)
            controls.release_activation_forward_gpu_memory(layer)
        controls.start_reload_layer(2)
        assert memory.done == ["out", "wait out", "out", "wait out", "back"]
        assert_equal([run.backward()], [expected.backward()])  # layer 0 comes back by itself
        assert memory.done[5:] == ["wait back", "back", "wait back"]
        memory.done.clear()
    assert_equal([*layers.parameters()], [*plain.parameters()])
    gc.collect()
    assert memory.alive == 0


@pytest.mark.parametrize("model_layers", [None, 2 * LAYERS])
def test_two_forwards_before_a_backward(model_layers: int | None) -> None:
    """As in a pipeline: the numbers go on while tensors of an earlier forward are saved."""
    memory, offload, controls = manual(model_layers)
    plain, layers = model(), model()
    runs = [Run(layers, offload, 0), Run(layers, offload, 1)]
    others = [Run(plain, None, 0), Run(plain, None, 1)]
    for layer in range(2 * LAYERS):
        controls.start_offload_layer(layer)
        controls.release_activation_forward_gpu_memory(layer)
    controls.start_reload_layer(1)
    assert_equal([runs[0].backward()], [others[0].backward()])
    runs.append(Run(layers, offload, 2))
    others.append(Run(plain, None, 2))
    first = 2 * LAYERS if model_layers is None else 0
    controls.start_offload_layer(first)
    assert memory.done.count("out") == 2 * LAYERS + 1
    for run, other in zip(runs[1:], others[1:], strict=True):
        assert_equal([run.backward()], [other.backward()])
    gc.collect()
    assert memory.alive == 0
    Run(layers, offload, 3)
    with pytest.raises(ValueError, match=f"below {LAYERS}, got {LAYERS}"):
        controls.start_offload_layer(LAYERS)


def test_the_order_of_calls() -> None:
    memory, offload, controls = manual()
    run = Run(model(), offload, 0)
    calls: list[Callable[[int], None]] = [
        controls.start_offload_layer,
        controls.release_activation_forward_gpu_memory,
        controls.start_reload_layer,
    ]
    for done in range(4):
        for call in calls[:done] + calls[done + 1 :]:
            with pytest.raises(RuntimeError, match=r"\[cpu_offload\] expected layer 1 to be .* in"):
                call(1)
        if done < 3:
            calls[done](1)
    run.backward()
    for call in calls:
        call(0)  # the backward has run: nothing is left to move
    assert memory.done.count("out") == 1


def test_errors() -> None:
    _, offload, controls = manual()
    with pytest.raises(ValueError, match=r"number of a layer that has run in the context.*got 0"):
        controls.start_offload_layer(0)
    x = torch.randn(16, 32, requires_grad=True)
    with offload:
        y = x * x
    with pytest.raises(RuntimeError, match=r"synchronization function after the layer.*layer 0"):
        controls.start_offload_layer(0)
    offload.synchronize(y)
    controls.start_offload_layer(0)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="in-place operation has changed"):
        controls.release_activation_forward_gpu_memory(0)


@pytest.mark.parametrize("get", [te.get_cpu_offload_context, get_cpu_offload_context])
def test_a_context_that_does_nothing_has_controls(get: Callable[..., tuple], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for enabled in (False, True):
        context, synchronize, controls = get(enabled, 1, manual_synchronization=True)
        x = torch.ones(3)
        with context:
            assert synchronize(x) is x
        controls.start_offload_layer(0)
        controls.release_activation_forward_gpu_memory(0)
        controls.start_reload_layer(0)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    stream = torch.cuda.Stream()
    context, synchronize, controls = te.get_cpu_offload_context(
        enabled=True, manual_synchronization=True, offload_stream=stream
    )
    torch.manual_seed(0)
    layers = [te.Linear(512, 512, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        layer.requires_grad_(True)
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)
    found = []
    for offloads in (False, True):
        y = x
        before = torch.cuda.memory_allocated()
        for i, layer in enumerate(layers):
            with context:
                y = layer(y)
            y = synchronize(y)
            if offloads:
                controls.start_offload_layer(i)
        if offloads:
            stream.synchronize()
            for i in range(LAYERS):
                controls.release_activation_forward_gpu_memory(i)
            assert torch.cuda.memory_allocated() - before < 2 * x.nbytes
            for i in reversed(range(LAYERS)):
                controls.start_reload_layer(i)
        found.append(torch.autograd.grad(y.square().sum(), [x, *layers[0].parameters()]))
        del y
    assert_equal(*found)
