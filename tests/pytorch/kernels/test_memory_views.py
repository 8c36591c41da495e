"""Tensors that use the memory of other tensors without keeping it alive."""

import weakref

import pytest
import torch

from transformer_engine.pytorch.kernels.memory_views import weak_view


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float8_e5m2])
def test_a_view_of_any_dtype_and_stride(device, dtype) -> None:
    x = torch.arange(24, device=device).view(4, 6).to(dtype)[1:, ::2].t()
    view = weak_view(x)
    assert (view.dtype, view.shape, view.stride()) == (x.dtype, x.shape, x.stride())
    assert view.data_ptr() == x.data_ptr()
    assert torch.equal(view.float(), x.float())


def test_it_keeps_nothing_alive(device) -> None:
    x = torch.ones(4, device=device)
    owner = weakref.ref(x)
    view = weak_view(x)
    x[1] = 5.0
    assert view.tolist() == [1.0, 5.0, 1.0, 1.0]
    del x
    assert owner() is None


def test_nothing_to_view(device) -> None:
    assert weak_view(torch.empty(0, 3, device=device)).shape == (0, 3)
