"""Memory layouts of queries, keys and values: their names, and attention without copies."""

import pytest
import torch
from cases.attention import BACKENDS, cu_seqlens
from cases.attention import module as make_module
from rulers import assert_bitwise

from transformer_engine.pytorch.attention import _get_qkv_layout
from transformer_engine.pytorch.attention import core_attention as core

SIZES = {"s": 6, "b": 2, "t": 12, "h": 4, "d": 8, "3": 3, "2": 2}
LEADS = {"sbhd": "sb", "bshd": "bs", "thd": "t"}
LAYOUTS = [
    (qkv_format, layout.format(f=qkv_format, l=lead))
    for qkv_format, lead in LEADS.items()
    for layout in ("{l}3hd", "{l}h3d", "{f}_{l}2hd", "{f}_{l}h2d", "{f}_{f}_{f}")
]


def make_packed(layout, device="cpu"):
    """The tensors that a layout names, and (query, key, value) as views of them."""
    packed = [
        torch.randn([SIZES[axis] for axis in name], device=device).requires_grad_()
        for name in layout.split("_")
    ]
    return packed, taken_apart(packed, layout)


def taken_apart(packed, layout):
    parts = []
    for x, name in zip(packed, layout.split("_"), strict=True):
        count = next((axis for axis in "32" if axis in name), None)
        parts += x.unbind(name.index(count)) if count else [x]
    return parts


@pytest.mark.parametrize(("qkv_format", "layout"), LAYOUTS)
def test_names(qkv_format, layout):
    _, parts = make_packed(layout)
    assert _get_qkv_layout(*parts, qkv_format) == layout


def test_default_format_is_sbhd():
    assert _get_qkv_layout(*make_packed("sbh3d")[1]) == "sbh3d"


def test_a_part_of_a_buffer_and_other_kinds_of_memory():
    whole = torch.randn(3, 6, 2, 3, 4, 8)
    assert _get_qkv_layout(*whole[1].unbind(2), "sbhd") == "sb3hd"
    assert _get_qkv_layout(*whole.to("meta")[1].unbind(2), "sbhd") == "sb3hd"
    q, k, v = torch.empty(3, 6, 2, 4, 8, device="meta").unbind(0)
    assert _get_qkv_layout(q, k, v, "sbhd") == "sbhd_sbhd_sbhd"


def test_keys_have_heads_and_sequences_of_their_own():
    q = torch.randn(5, 2, 8, 16)
    k, v = torch.randn(7, 2, 2, 2, 16).unbind(3)
    assert _get_qkv_layout(q, k, v, "sbhd") == "sbhd_sbh2d"
    k, v = torch.randn(7, 2, 2, 16), torch.randn(7, 2, 2, 24)
    assert _get_qkv_layout(q, k, v, "sbhd") == "sbhd_sbhd_sbhd"


def test_one_head_has_the_first_name():
    assert _get_qkv_layout(*torch.randn(6, 2, 1, 3, 8).unbind(3), "sbhd") == "sb3hd"


def test_the_order_counts():
    q, k, v = torch.randn(6, 2, 3, 4, 8).unbind(2)
    for parts in ((k, q, v), (q, v, k), (q, q, q), (q, k, v.clone()), (q.clone(), v, k)):
        with pytest.raises(ValueError, match=r"sb3hd, sbh3d, sbhd_sb2hd or sbhd_sbh2d"):
            _get_qkv_layout(*parts, "sbhd")
    assert _get_qkv_layout(q.clone(), torch.randn(6, 2, 4, 8), q.clone()) == "sbhd_sbhd_sbhd"


def test_errors():
    q = torch.randn(6, 2, 4, 8)
    with pytest.raises(ValueError, match=r"expected qkv_format in \{sbhd, bshd, thd\}, got 'sb'"):
        _get_qkv_layout(q, q, q, "sb")
    with pytest.raises(ValueError, match=r"expected k of 4 dimensions .*'sbhd', got shape \(2, 4"):
        _get_qkv_layout(q, q[0], q, "sbhd")
    strided = torch.randn(6, 2, 4, 16)[..., ::2]
    with pytest.raises(ValueError, match=r"strides \(128, 64, 16, 2\) at 0"):
        _get_qkv_layout(q, strided, q, "sbhd")
    padded = torch.randn(6, 2, 4, 4, 8).unbind(2)[:3]  # a fourth part lies between tokens
    with pytest.raises(ValueError, match=r"expected contiguous tensors, or views"):
        _get_qkv_layout(*padded, "sbhd")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("qkv_format", "layout"), [x for x in LAYOUTS if x[0] != "thd"])
def test_backends_get_views(device, monkeypatch, backend, qkv_format, layout):
    for name, value in BACKENDS[backend].items():
        monkeypatch.setenv(name, value)
    packed, parts = make_packed(layout, device)
    seen = []
    choose = core.choose

    def watched(*problem):
        chosen = choose(*problem)

        def forward(query, key, value, *others):
            seen.extend(x.data_ptr() for x in (query, key, value))
            return chosen.forward(query, key, value, *others)

        return chosen._replace(forward=forward)

    monkeypatch.setattr(core, "choose", watched)
    module = make_module(qkv_format=qkv_format)
    out = module(*parts)
    assert seen == [x.data_ptr() for x in parts]
    upstream = torch.randn_like(out)
    out.backward(upstream)

    alone = [x.detach().clone().requires_grad_() for x in parts]
    expected = module(*alone)
    expected.backward(upstream)
    torch.testing.assert_close(out, expected)
    gradients = taken_apart([x.grad for x in packed], layout)
    for gradient, one in zip(gradients, alone, strict=True):
        torch.testing.assert_close(gradient, one.grad)


@pytest.mark.parametrize("layout", [layout for name, layout in LAYOUTS if name == "thd"])
def test_packed_sequences(device, layout):
    packed, parts = make_packed(layout, device)
    module = make_module(qkv_format="thd", attn_mask_type="padding_causal")
    ends = cu_seqlens([5, 7], device)
    out = module(*parts, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    alone = [x.detach().clone() for x in parts]
    torch.testing.assert_close(out, module(*alone, cu_seqlens_q=ends, cu_seqlens_kv=ends))
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in packed)


@pytest.mark.parametrize(
    ("qkv_format", "layout"), [x for x in LAYOUTS if "3" in x[1] or "2" in x[1]]
)
def test_packed_arguments(device, qkv_format, layout):
    """Results and gradients are those of the three views, without a copy in between."""
    packed, parts = make_packed(layout, device)
    named = {"qkv_layer": packed[0]} if len(packed) == 1 else {"kv_layer": packed[1]}
    queries = {} if len(packed) == 1 else {"query_layer": packed[0]}
    axis = -2 if layout.endswith(("3d", "2d")) else -3
    mask_type, ends = "causal", {}
    if qkv_format == "thd":
        mask_type, lengths = "padding_causal", cu_seqlens([5, 7], device)
        ends = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    module = make_module(qkv_format=qkv_format, attn_mask_type=mask_type)
    expected = module(*parts, **ends)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, packed, upstream)
    out = module(**queries, **named, qkv_interleave_dim=axis, **ends)
    assert_bitwise(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, packed, upstream), wanted)


@pytest.mark.parametrize(
    ("shapes", "axis", "error", "text"),
    [
        (
            {"qkv_layer": (6, 2, 3, 4, 8), "key_layer": (6, 2, 4, 8)},
            -3,
            ValueError,
            "got key_layer, q",
        ),
        (
            {"kv_layer": (6, 2, 2, 4, 8)},
            -3,
            ValueError,
            "or query_layer and kv_layer, got kv_layer",
        ),
        ({"qkv_layer": (6, 2, 3, 4, 8)}, -2, ValueError, r"3 parts along dimension -2, got \(6, 2"),
        ({"qkv_layer": (6, 2, 3, 4, 8)}, 2, ValueError, "qkv_interleave_dim -3 or -2, got 2"),
        ({"qkv_layer": (8,)}, -3, ValueError, r"3 parts along dimension -3, got \(8,\)"),
        ({"query_layer": (6, 2, 4, 8)}, -3, TypeError, "key_layer to be a torch.Tensor, got None"),
    ],
)
def test_packed_arguments_that_do_not_fit(shapes, axis, error, text):
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    with pytest.raises(error, match=text):
        make_module()(**tensors, qkv_interleave_dim=axis)
