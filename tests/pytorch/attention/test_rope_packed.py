"""`apply_fused_qkv_rotary_pos_emb`: a packed projection against its parts, rotated alone."""

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)

LEADS = {"sbhd": (6, 2), "bshd": (2, 6), "thd": (12,)}


def angles(dim, device, interleaved=False):
    return RotaryPositionEmbedding(dim, interleaved=interleaved).to(device)(6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(8, 8, 8), (24, 8, 4)])
@pytest.mark.parametrize("tensor_format", LEADS)
def test_parts(device, tensor_format, sizes, dtype):
    """A head of queries is `sizes[1]` elements; queries and keys may have other angles."""
    packed = torch.randn(*LEADS[tensor_format], 3, sum(sizes), device=device).to(dtype)
    packed.requires_grad_()
    options = {"tensor_format": tensor_format, "interleaved": True}
    if tensor_format == "thd":
        options["cu_seqlens"] = torch.tensor([0, 5, 11, 12], dtype=torch.int32, device=device)
    else:
        options["start_positions"] = torch.tensor([2, 0], dtype=torch.int32, device=device)
    freqs = angles(8, device, True), angles(4, device, True)
    query, key, value = apply_fused_qkv_rotary_pos_emb(packed, *freqs, list(sizes), **options)
    heads = packed[..., : sizes[0]].reshape(*LEADS[tensor_format], -1, sizes[1])
    others = (
        apply_rotary_pos_emb(heads, freqs[0], fused=True, **options),
        apply_rotary_pos_emb(packed[..., sizes[0] : -sizes[2]], freqs[1], fused=True, **options),
        packed[..., -sizes[2] :],
    )
    upstream = [torch.randn_like(x) for x in others]
    for found, other in zip((query, key, value), others, strict=True):
        assert_bitwise(found, other)
    (grad,) = torch.autograd.grad((query, key, value), packed, upstream)
    (expected,) = torch.autograd.grad(others, packed, upstream)
    assert_bitwise(grad, expected)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"qkv": None}, TypeError, r"\[apply_fused_qkv_rotary_pos_emb\] expected qkv to be"),
        (
            {"qkv": torch.randn(24)},
            ValueError,
            r"24 elements in the last dimension, .* got \(24,\)",
        ),
        ({"sizes": [8, 8]}, ValueError, r"of three sizes of 1 or more.* got \[8, 8\]"),
        ({"sizes": [12, 8, 4]}, ValueError, r"first a multiple of the second, got \[12, 8, 4\]"),
        ({"sizes": [8, 8, 16]}, ValueError, r"of 32 elements in the last dimension"),
        ({"sizes": [8.0, 8, 8]}, TypeError, "qkv_split_arg_list"),
        ({"q_freqs": angles(16, "cpu")}, ValueError, "freqs of at most 8 elements"),
    ],
)
def test_arguments_that_do_not_fit(changes, error, text):
    own = {"qkv": torch.randn(6, 2, 3, 24), "q_freqs": angles(8, "cpu"), "sizes": [8, 8, 8]}
    own |= changes
    with pytest.raises(error, match=text):
        apply_fused_qkv_rotary_pos_emb(own["qkv"], own["q_freqs"], angles(8, "cpu"), own["sizes"])
