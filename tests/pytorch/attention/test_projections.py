"""Parts of a projection are views; their gradients become one tensor, uncopied if possible."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.core.projections import (
    HeadLayout,
    in_packs,
    join_gradients,
    split_qkv,
    views,
)
from transformer_engine.pytorch.kernels.packed import empty_like_parts

LAYOUTS = [
    HeadLayout(4, 4, 8, True),
    HeadLayout(4, 4, 8, False),
    HeadLayout(4, 2, 8, False),
    HeadLayout(4, 2, 8, True),
]


def project(layout, lead=(5, 3)):
    features = (layout.heads + 2 * layout.groups) * layout.size
    return torch.randn(*lead, features, requires_grad=True)


def by_definition(x, layout):
    """Returns queries, keys and values by the places of their heads in the projection."""
    size, per_group = layout.size, layout.heads // layout.groups
    heads = x.view(*x.shape[:-1], -1, size)
    if not layout.interleaved:
        return heads.split((layout.heads, layout.groups, layout.groups), -2)
    kinds = [i % (per_group + 2) for i in range(heads.shape[-2])]
    queries = [i for i, kind in enumerate(kinds) if kind < per_group]
    keys, values = ([i for i, k in enumerate(kinds) if k == per_group + j] for j in (0, 1))
    return tuple(heads[..., chosen, :] for chosen in (queries, keys, values))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("lead", [(5, 3), (7,)], ids=str)
def test_parts_and_gradients(layout, lead):
    x = project(layout, lead)
    parts, expected = split_qkv(x, layout), by_definition(x, layout)
    upstream = [torch.randn_like(part) for part in expected]
    for part, wanted in zip(parts, expected, strict=True):
        assert torch.equal(part, wanted)
    grad, wanted = (torch.autograd.grad(each, x, upstream) for each in (parts, expected))
    assert torch.equal(grad[0], wanted[0])


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_gradients_that_lie_as_the_parts_do_are_not_copied(layout):
    x = project(layout)
    parts = split_qkv(x, layout)
    gradients = empty_like_parts(*parts)
    for gradient in gradients:
        gradient.normal_()
    (whole,) = torch.autograd.grad(parts, x, gradients)
    assert whole.is_contiguous() and whole.shape == x.shape
    assert whole.untyped_storage().data_ptr() == gradients[0].untyped_storage().data_ptr()
    for gradient, place in zip(gradients, by_definition(whole, layout), strict=True):
        assert torch.equal(gradient, place)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", [8, 12])
def test_copies_do_not_depend_on_alignment(layout, offset, size, device):
    layout = layout._replace(size=size)
    features = (layout.heads + 2 * layout.groups) * size
    memory = torch.randn(15 * features + 1, device=device).bfloat16()
    x = memory[offset : offset + 15 * features].view(5, 3, features)
    expected = by_definition(x, layout)
    for part, wanted in zip(views(x, layout), expected, strict=True):
        assert torch.equal(part, wanted)
    apart = [
        torch.empty(part.numel() + 1, dtype=x.dtype, device=device)[offset:][: part.numel()]
        .view(part.shape)
        .copy_(part)
        for part in expected
    ]
    assert torch.equal(join_gradients(tuple(apart), layout), x)
    packed = in_packs(*apart)
    assert (packed[0] is apart[0]) == (bool(offset) or size == 12)


def test_gradients_of_two_tensors_are_copied():
    layout = LAYOUTS[1]
    x = project(layout)
    parts = split_qkv(x, layout)
    one, other = (empty_like_parts(*parts) for _ in range(2))
    gradients = [x.normal_() for x in (one[0], other[1], one[2])]
    (whole,) = torch.autograd.grad(parts, x, gradients)
    for gradient, place in zip(gradients, by_definition(whole, layout), strict=True):
        assert torch.equal(gradient, place)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.randn(5, 3, 4, 8) for _ in range(3)],
        torch.randn(5, 3, 4, 32).split((8, 8, 8, 8), -1)[:3],  # a fourth part is missing
        torch.randn(5, 3, 12, 8).split((4, 4, 4), -2)[::-1],
        torch.randn(3, 5, 12, 8).transpose(0, 1).split((4, 4, 4), -2),
    ],
    ids=["apart", "incomplete", "in another order", "transposed"],
)
def test_what_fills_no_tensor_is_allocated_apart(parts):
    made = empty_like_parts(*parts)
    assert all(
        x.is_contiguous() and x.shape == part.shape for x, part in zip(made, parts, strict=True)
    )
    assert len({x.untyped_storage().data_ptr() for x in made}) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_cudnn_writes_one_gradient(monkeypatch, layout, qkv_format):
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "1")
    layout = layout._replace(size=64)
    features = (layout.heads + 2 * layout.groups) * layout.size
    x = torch.randn(128, 2, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module = te.DotProductAttention(
        layout.heads, layout.size, num_gqa_groups=layout.groups, qkv_format=qkv_format
    )
    parts = split_qkv(x, layout)
    out = module(*parts)
    upstream = torch.randn_like(out)
    copies = [part.contiguous() for part in by_definition(x, layout)]
    (expected,) = torch.autograd.grad(module(*copies), x, upstream)
    with torch.profiler.profile() as profile:
        (whole,) = torch.autograd.grad(out, x, upstream)
    assert (whole - expected).float().norm() < 1e-2 * expected.float().norm()
    names = {event.name for event in profile.events()}
    assert names.isdisjoint({"aten::cat", "aten::stack", "aten::copy_"})
