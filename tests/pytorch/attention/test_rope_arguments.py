"""What `apply_rotary_pos_emb` accepts and refuses, fused (in one kernel) and unfused."""

import pytest
import torch

from transformer_engine.pytorch.attention import MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

pytestmark = pytest.mark.parametrize("fused", [False, True])

ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def angles_on(device):
    return RotaryPositionEmbedding(8).to(device)(8)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("starts", [int32(1), int32(1, 2, 3), int32(1, 2)[:, None]], ids=str)
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_starts_of_another_number(fused, tensor_format, starts):
    """In every format there are two sequences."""
    t = torch.randn(5, 1, 8) if tensor_format == "thd" else torch.randn(2, 2, 1, 8)
    with pytest.raises(ValueError, match=r"start_positions of shape \(2,\), one of each sequence"):
        apply_rotary_pos_emb(
            t, angles_on("cpu"), tensor_format, fused, ENDS, start_positions=starts
        )


@pytest.mark.parametrize("starts", [None, int32(0, 1)], ids=str)
@pytest.mark.parametrize("ends", [int32(0, 4, 2), int32(1, 2, 5), int32(0, 2, 6)], ids=str)
def test_ends_that_fall_or_go_beyond_the_tokens(fused, ends, starts):
    with pytest.raises(ValueError, match=r"cu_seqlens to rise from 0 to at most 5 \(the tokens\)"):
        apply_rotary_pos_emb(
            torch.randn(5, 1, 8), angles_on("cpu"), "thd", fused, ends, start_positions=starts
        )


def test_integers_are_not_rotated(fused):
    with pytest.raises(TypeError, match=r"expected t of floating point, got torch.int64"):
        apply_rotary_pos_emb(torch.ones(3, 2, 1, 8).long(), angles_on("cpu"), fused=fused)


@pytest.mark.parametrize("tensor_format", ["bshd", "thd"])
def test_starts_and_ends_may_have_strides(device, fused, tensor_format):
    """Also after calls with contiguous tensors."""
    t = torch.randn(*((5,) if tensor_format == "thd" else (2, 3)), 1, 8, device=device)
    t.requires_grad_()
    ends = ENDS.to(device) if tensor_format == "thd" else None
    starts, angles, results = int32(1, 2).to(device), angles_on(device), []
    for strided in (False, False, True, False):
        if strided:
            starts = starts.repeat_interleave(2)[::2]
            ends = None if ends is None else ends.repeat_interleave(2)[::2]
            assert not starts.is_contiguous()
        out = apply_rotary_pos_emb(t, angles, tensor_format, fused, ends, start_positions=starts)
        results.append((out, *torch.autograd.grad(out.square().sum() + out[..., 0].sum(), t)))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_empty_tensors_may_have_strides(device, fused):
    angles, odd = angles_on(device), torch.randn(0, 2, 1, 16, device=device)[..., ::2]
    assert odd.stride(-1) == 2
    assert apply_rotary_pos_emb(odd, angles, fused=fused).shape == odd.shape
    t = torch.randn(0, 2, 1, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(apply_rotary_pos_emb(t, angles, fused=fused), t, odd)
    assert grad.shape == t.shape


def test_ends_of_a_layer_may_have_strides(device, fused):
    layer = MultiheadAttention(
        *(16, 2),
        qkv_format="thd",
        attn_mask_type="padding",
        attention_dropout=0.0,
        fuse_qkv_params=fused,
        device=device,
    )
    x, ends = torch.randn(5, 16, device=device), ENDS.to(device)
    strided = ends.repeat_interleave(2)[::2]
    whole, found = (
        layer(x, rotary_pos_emb=angles_on(device), cu_seqlens_q=one, cu_seqlens_kv=one)
        for one in (ends, strided)
    )
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens": [0, 2, 5]}, TypeError, "cu_seqlens to be a torch.Tensor, got list"),
        ({"cu_seqlens": ENDS.float()}, TypeError, "cu_seqlens of int32 or int64, got torch.float"),
        ({"cu_seqlens": ENDS.to("meta")}, ValueError, "cu_seqlens on cpu, where t is, got meta"),
        ({"start_positions": [1, 2]}, TypeError, "start_positions to be a torch.Tensor, got list"),
        ({"start_positions": torch.ones(2)}, TypeError, "start_positions of int32 or int64, got"),
        ({"start_positions": int32(0, 1) > 0}, TypeError, "of int32 or int64, got torch.bool"),
        ({"cp_size": 2.0, "cp_rank": 1}, TypeError, r"cp_size to be an int, got 2\.0"),
        ({"cp_size": None}, TypeError, "cp_size to be an int, got None"),
    ],
)
def test_arguments_of_another_type(fused, changes, error, message):
    own = {"t": torch.randn(5, 1, 8), "freqs": angles_on("cpu"), "tensor_format": "thd"}
    own |= {"cu_seqlens": ENDS, "fused": fused, **changes}
    with pytest.raises(error, match=rf"^\[apply_rotary_pos_emb\] expected .*{message}"):
        apply_rotary_pos_emb(**own)
