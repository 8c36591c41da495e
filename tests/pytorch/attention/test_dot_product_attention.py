"""DotProductAttention: overrides, formats, scale, slopes (see also `test_attention_matrix.py`)."""

import attention_reference as reference
import pytest
import torch
from cases.attention import BACKENDS, cu_seqlens
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv
from cases.attention_matrix import norm_error

from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import sdpa
from transformer_engine.pytorch.attention.masks.alibi import default_slopes


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    for name, value in BACKENDS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


def test_forward_overrides_the_constructor(device):
    q, k, v = make_qkv(device)
    module = make_module(attn_mask_type="causal", qkv_format="sbhd")
    expected = make_module(attn_mask_type="no_mask", window_size=(1, 1), qkv_format="bshd")(q, k, v)
    out = module(q, k, v, attn_mask_type="no_mask", window_size=[1, 1], qkv_format="bshd")
    assert torch.equal(out, expected)


def test_masks_given_to_types_without_one_are_ignored(device):
    q, k, v = make_qkv(device)
    hidden = torch.ones(2, 1, 1, 5, dtype=torch.bool, device=device)
    for mask_type in ("no_mask", "causal"):
        module = make_module(attn_mask_type=mask_type)
        assert torch.equal(module(q, k, v, hidden), module(q, k, v))


def test_lengths_say_the_same_as_masks(device, backend):
    q, k, v = make_qkv(device)
    module = make_module(attn_mask_type="padding_causal")
    lengths = torch.tensor([3, 5])
    hidden = (torch.arange(5) >= lengths[:, None]).view(2, 1, 1, 5).to(device)
    ends = cu_seqlens(lengths, device)
    by_lengths = module(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    assert torch.equal(by_lengths, module(q, k, v, hidden))


def test_formats_agree(device, backend):
    lengths = torch.tensor([3, 5])
    q, k, v = make_qkv(device, shape=(2, 5, 4, 8), grad=False)
    ends = cu_seqlens(lengths, device)
    arguments = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    module = make_module(attn_mask_type="padding_causal", qkv_format="bshd")
    bshd = module(q, k, v, **arguments)
    sbhd = module(*(x.transpose(0, 1) for x in (q, k, v)), qkv_format="sbhd", **arguments)
    packed = [torch.cat((x[0, :3], x[1])) for x in (q, k, v)]
    thd = module(*packed, qkv_format="thd", max_seqlen_q=5, max_seqlen_kv=5, **arguments)
    # Equal bit for bit on the CPU; on a GPU other strides may mean another GEMM kernel.
    bound = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(sbhd.transpose(0, 1), bshd, **bound)
    torch.testing.assert_close(thd, torch.cat((bshd[0, :3], bshd[1])), **bound)


def test_room_between_sequences(device, backend):
    """Gaps in thd change no result of a token; their own results and gradients are zero."""
    q, k, v = make_qkv(device, shape=(8, 4, 8), grad=False)
    ends = cu_seqlens([3, 5], device)
    module = make_module(attn_mask_type="padding_causal", qkv_format="thd")
    packed = module(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    place = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8], device=device)
    spread = [x.new_full((12, 4, 8), 7.0).index_copy(0, place, x) for x in (q, k, v)]
    spread = [x.requires_grad_() for x in spread]
    starts = torch.tensor([0, 4, 12], dtype=torch.int32, device=device)
    out = module(
        *spread,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
    )
    gaps = torch.tensor([3, 9, 10, 11], device=device)
    assert torch.equal(out[place], packed)
    out.sum().backward()
    for x in (out, *(s.grad for s in spread)):
        assert int(x[gaps].count_nonzero()) == 0


@pytest.mark.parametrize("sizes", [(0, 2, 5), (3, 0, 5), (3, 2, 0)], ids=str)
def test_nothing_to_attend(device, sizes):
    queries, batch, keys = sizes
    q = torch.randn(queries, batch, 4, 8, device=device, requires_grad=True)
    k = torch.randn(keys, batch, 4, 8, device=device, requires_grad=True)
    out = make_module(attn_mask_type="no_mask")(q, k, k)
    assert out.shape == (queries, batch, 32)
    assert int(out.count_nonzero()) == 0
    out.sum().backward()
    assert int(q.grad.count_nonzero()) == 0


def test_scale(device, backend):
    q, k, v = make_qkv(device, grad=False)
    out = make_module(softmax_scale=0.7, attn_mask_type="no_mask")(q, k, v)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    exact = reference.attention(*(x.cpu().transpose(0, 1) for x in (q, k, v)), seen, scale=0.7)
    assert norm_error(out.view(5, 2, 4, 8).transpose(0, 1), exact) < 1e-5


def test_large_fp16_scores_do_not_overflow(device, backend):
    q = torch.full((3, 1, 4, 128), 25.0, device=device, dtype=torch.float16)
    v = torch.randn(3, 1, 4, 128, device=device, dtype=torch.float16)
    out = make_module(kv_channels=128, attn_mask_type="no_mask")(q, q, v)
    exact = v.float().mean(0, keepdim=True).expand(3, 1, 4, 128).reshape(3, 1, 512)
    torch.testing.assert_close(out.float(), exact, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12])
def test_default_slopes(device, heads):
    slopes = default_slopes(heads, torch.device(device))
    torch.testing.assert_close(slopes.flatten().double().cpu(), reference.slopes_of(heads))


def test_default_slopes_are_fp32(device, default_dtype):
    """Some slopes of 12 heads are not powers of two."""
    slopes = default_slopes(12, torch.device(device))
    assert slopes.dtype is torch.float32
    torch.testing.assert_close(slopes.flatten().double().cpu(), reference.slopes_of(12))


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_given_slopes(device, shape):
    q, k, v = make_qkv(device, grad=False)
    slopes = torch.rand(shape)
    out = make_module(attn_mask_type="no_mask")(
        q, k, v, core_attention_bias_type="alibi", alibi_slopes=slopes.to(device)
    )
    bias = reference.alibi(slopes.double(), 5, 5, [(5, 5)] * 2)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    exact = reference.attention(*(x.cpu().transpose(0, 1) for x in (q, k, v)), seen, post_bias=bias)
    assert norm_error(out.view(5, 2, 4, 8).transpose(0, 1), exact) < 1e-5


def test_autocast_sets_the_dtype(device):
    q, k, v = make_qkv(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = make_module()(q, k, v)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
def test_sdpa_runs_cudnn_on_hopper(monkeypatch, groups):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN is the fastest from Hopper on")
    monkeypatch.setattr(core, "choose", lambda *call: sdpa.BACKEND)
    inputs = [
        torch.randn(256, 3, heads, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads in (4, groups, groups)
    ]
    module = make_module(kv_channels=128, num_gqa_groups=groups)
    module(*inputs)
    order = torch._C._get_sdp_priority_order()  # torch may have set it in the first call
    with torch.profiler.profile() as profile:
        module(*inputs)
    names = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_cudnn_attention" in names
    assert "aten::clone" not in names, "flat heads are a view, and nothing else is copied"
    assert torch._C._get_sdp_priority_order() == order


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding"])
@pytest.mark.parametrize("groups", [4, 2])
def test_sdpa_of_large_tensors_runs_a_kernel_that_is_right(
    device, monkeypatch, qkv_format, mask_type, groups
):
    """Of torch 2.11's fast kernels only the memory-efficient one is right from 2^31 elements."""
    monkeypatch.setattr(core, "choose", lambda *call: sdpa.BACKEND)
    module = make_module(
        kv_channels=64, num_gqa_groups=groups, qkv_format=qkv_format, attn_mask_type=mask_type
    )
    shape = (48, 2) if qkv_format == "sbhd" else (2, 48)
    inputs = [torch.randn(*shape, heads, 64, device=device) for heads in (4, groups, groups)]
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    padding = None
    if mask_type == "padding":
        padding = torch.zeros(2, 1, 1, 48, dtype=torch.bool, device=device)
        padding[1, ..., 40:] = True
    module(*inputs, attention_mask=padding)  # torch sets its order when it first chooses a kernel
    order, names, results = sdpa.sdpa_order(), set(), []
    for large in (False, True):
        monkeypatch.setattr(sdpa, "_is_large", lambda *tensors, large=large: large)
        with torch.profiler.profile() as profile:
            out = module(*inputs, attention_mask=padding)
            gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        results.append((out, *gradients))
        names = {event.name for event in profile.events()}
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert sdpa.sdpa_order() == order
    if device == "cuda":
        assert "aten::_scaled_dot_product_efficient_attention_backward" in names
