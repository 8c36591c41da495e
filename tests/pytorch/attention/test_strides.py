"""Attention reads tensors of any strides and addresses, in every format and kernel."""

import pytest
import torch

import transformer_engine.pytorch as te

HEADS, TOKENS, BATCH = 4, 24, 2


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy in a larger tensor, where it begins at element 3 of every dimension."""
    room = x.new_full([n + 3 for n in x.shape], 7.0)
    view = room[tuple(slice(3, None) for _ in x.shape)]
    return view.copy_(x)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7.0)[..., ::2].copy_(x)


def behind_one(x: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy at an address that is not a multiple of 16 bytes."""
    return x.new_zeros(x.numel() + 1)[1:].view_as(x).copy_(x)


def size_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, 0).contiguous().transpose(-1, 0)


LAYOUTS = [shifted, every_second, behind_one, size_first]
# Masks of every kind, because the choice of the kernel depends on the mask.
MASKS = {
    "no_mask": None,
    "causal": None,
    "padding": torch.arange(TOKENS).view(1, 1, 1, -1) >= torch.tensor([20, 7]).view(-1, 1, 1, 1),
    "arbitrary": torch.rand(BATCH, 1, TOKENS, TOKENS, generator=torch.manual_seed(0)) < 0.3,
}


def attend(module, mask_type, mask, inputs, gradient):
    """Returns the result and the gradients, and the result of a call without gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    mask = None if mask is None else mask.to(leaves[0].device)
    out = module(*leaves, attention_mask=mask, attn_mask_type=mask_type)
    gradients = torch.autograd.grad(out, leaves, gradient)
    with torch.no_grad():
        again = module(*inputs, attention_mask=mask, attn_mask_type=mask_type)
    return [out.detach(), *gradients, again]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize(("size", "groups"), [(64, HEADS), (128, 2), (16, 1), (20, HEADS)])
def test_strides_change_nothing(layout, dtype, mask_type, size, groups, device):
    torch.manual_seed(0)
    module = te.DotProductAttention(
        HEADS, size, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="bshd"
    )
    shapes = [(BATCH, TOKENS, heads, size) for heads in (HEADS, groups, groups)]
    plain = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    gradient = torch.randn(BATCH, TOKENS, HEADS * size, device=device, dtype=dtype)
    how = (module, mask_type, MASKS[mask_type])
    expected = attend(*how, plain, gradient)
    found = attend(*how, [layout(x) for x in plain], layout(gradient))
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", [(1, TOKENS, 1), (BATCH, 1, 1, 1), (HEADS, 1, 1), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_broadcast_over_keys(shape, dtype, device):
    torch.manual_seed(0)
    module = te.DotProductAttention(HEADS, 64, attention_dropout=0.0, qkv_format="bshd")
    shapes = [(BATCH, TOKENS, HEADS, 64)] * 3
    inputs = [torch.randn(one, device=device, dtype=dtype) for one in shapes]
    mask = torch.rand(shape) < 0.5
    gradient = torch.randn(BATCH, TOKENS, HEADS * 64, device=device, dtype=dtype)
    found = attend(module, "arbitrary", mask, inputs, gradient)
    whole = mask.expand(BATCH, HEADS, TOKENS, TOKENS).contiguous()
    expected = attend(module, "arbitrary", whole, inputs, gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
