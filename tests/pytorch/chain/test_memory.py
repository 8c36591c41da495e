"""Memory from torch's fastest allocation function: the same tensors as from `torch.empty`."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from transformer_engine.pytorch.kernels import memory


def torch_lacks_the_short_way(monkeypatch):
    monkeypatch.setattr(memory, "empty_on_cpu", None)
    monkeypatch.setattr(memory, "empty_on_gpu", None)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_every_allocator_gives_what_was_asked_for(device, monkeypatch, short, dtype):
    if not short:
        torch_lacks_the_short_way(monkeypatch)
    where = torch.empty(0, device=device).device
    ways = memory.allocators(where)
    assert len(ways) == 1 + short
    for way in ways:
        made = way((2, 3), (3, 1), dtype)
        assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), dtype)
        assert made.device == where


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 2), (0, 3), torch.Size([5])])
def test_new_empty(device, monkeypatch, short, shape):
    if not short:
        torch_lacks_the_short_way(monkeypatch)
    like = torch.ones(2, dtype=torch.float16, device=device)
    for dtype in (None, torch.float32):
        made, expected = memory.new_empty(like, shape, dtype), like.new_empty(shape, dtype=dtype)
        assert (made.shape, made.stride()) == (expected.shape, expected.stride())
        assert (made.dtype, made.device) == (expected.dtype, expected.device)


def test_modes_see_what_is_allocated(device):
    """While a call is recorded, a dispatch mode must see all memory that Python allocates."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            seen.append(result.data_ptr())
            return result

    like = torch.empty(3, device=device)
    with Watch():
        made = memory.new_empty(like, (4, 5))
    assert seen == [made.data_ptr()]


def test_fake_tensors_have_no_memory():
    with torch._subclasses.FakeTensorMode():
        made = memory.new_empty(torch.ones(2, device="cuda"), (4, 3))
    assert isinstance(made, torch._subclasses.FakeTensor)


def test_a_recording_asks_the_next_allocator_where_torch_lacks_the_short_way(device, monkeypatch):
    layer = te.Linear(16, 32, device=device)
    x = torch.randn(16, 16, device=device)
    expected = layer(x)
    torch_lacks_the_short_way(monkeypatch)
    layer.drop_plans()
    assert torch.equal(layer(x), expected)


@pytest.mark.multi_gpu
def test_results_lie_where_the_layer_does_whichever_gpu_is_current():
    layer, x = te.Linear(16, 32, device="cuda:1"), torch.randn(16, 16, device="cuda:1")
    for recorded, current in ((0, 1), (1, 0)):
        layer.drop_plans()
        for index in (recorded, current):
            with torch.cuda.device(index):
                y = layer(x)
                made = memory.new_empty(x, (4, 3))
            assert y.device == made.device == x.device
            expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(y, expected)
