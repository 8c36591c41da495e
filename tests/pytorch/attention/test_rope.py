"""Rotary position embedding: angles and rotations against the definition, element by element."""

import math

import pytest
import torch

from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.parallel.order import to_rank_order, to_sequence_order


def frequency(i, dim, base=10000.0):
    return base ** (-2 * i / dim)


def rotated(x, position, dim, interleaved, base=10000.0):
    """Returns a head `[size]` in float64, with its first `dim` elements rotated pair by pair."""
    y = x.double().clone()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position * frequency(i, dim, base)
        y[a] = x[a].double() * math.cos(angle) - x[b].double() * math.sin(angle)
        y[b] = x[b].double() * math.cos(angle) + x[a].double() * math.sin(angle)
    return y


def expected(t, dim, interleaved, positions):
    """Rotates each token of `t` `[batch, sequence, heads, size]` by its `positions[b][s]`."""
    rows = [
        torch.stack([rotated(head, positions[b][s], dim, interleaved) for head in t[b, s]])
        for b in range(t.shape[0])
        for s in range(t.shape[1])
    ]
    return torch.stack(rows).view(t.shape)


def angles_of(device, dim, length, interleaved=False):
    module = RotaryPositionEmbedding(dim, interleaved=interleaved).to(device)
    return module(length)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles(device, interleaved):
    angles = RotaryPositionEmbedding(8, interleaved=interleaved, rotary_base=500.0).to(device)(5, 3)
    assert angles.shape == (5, 1, 1, 8)
    assert angles.dtype is torch.float32
    for s in range(5):
        for i in range(4):
            pair = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            for element in pair:
                exact = (s + 3) * frequency(i, 8, 500.0)
                assert float(angles[s, 0, 0, element]) == pytest.approx(exact, rel=1e-6)


def test_angles_stay_fp32(device):
    module = RotaryPositionEmbedding(64).to(device)
    before = module(100)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(module(100), before)
    assert torch.equal(module.bfloat16()(100), before)
    assert module.state_dict() == {}


def test_percent_and_interpolation():
    assert RotaryPositionEmbedding(64, rotary_percent=0.25)(4).shape[-1] == 16
    plain = RotaryPositionEmbedding(8)(12)
    halved = RotaryPositionEmbedding(8, seq_len_interpolation_factor=2)(12)
    torch.testing.assert_close(halved, plain / 2)
    module = RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=5
    )
    torch.testing.assert_close(module(10), plain[:10] / 2)
    torch.testing.assert_close(module(12), plain / (12 / 5))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("dim", [8, 12])
def test_turned(device, tensor_format, interleaved, fused, dim):
    t = torch.randn(2, 5, 3, 12)
    angles = angles_of(device, dim, 7, interleaved)
    rope_input = t.transpose(0, 1) if tensor_format == "sbhd" else t
    out = apply_rotary_pos_emb(
        rope_input.to(device), angles, tensor_format, fused, interleaved=interleaved
    )
    result = out.transpose(0, 1) if tensor_format == "sbhd" else out
    exact = expected(t, dim, interleaved, [range(5)] * 2)
    torch.testing.assert_close(result.double().cpu(), exact, rtol=1e-5, atol=1e-5)


def test_fused_rounds_once(device):
    t = torch.randn(2, 9, 3, 16).bfloat16()
    angles = angles_of(device, 16, 9)
    exact = expected(t, 16, False, [range(9)] * 2)
    out = apply_rotary_pos_emb(t.to(device), angles, "bshd", True)
    assert out.dtype is torch.bfloat16
    assert float((out.cpu().double() - exact).abs().max()) <= float(exact.abs().max()) * 2**-8
    plain = apply_rotary_pos_emb(t.to(device), angles, "bshd")
    torch.testing.assert_close(plain.cpu().double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.sanitize
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "dim"), [(64, 64), (64, 32), (48, 32), (20, 6), (6, 2)], ids=str)
def test_kernel_on_views(device, tensor_format, interleaved, dtype, size, dim):
    """Queries are a view of a projection; the kernel reads whole packs or single elements."""
    heads, positions = 3, [range(9)] * 2
    qkv = torch.randn(2, 9, heads, 3 * size).to(dtype)
    t = qkv[..., size : 2 * size]
    rope_input, ends = qkv, None
    if tensor_format == "sbhd":
        rope_input = qkv.transpose(0, 1).contiguous()
    if tensor_format == "thd":
        rope_input = qkv.flatten(0, 1)
        ends = torch.arange(0, 19, 9, dtype=torch.int32, device=device)
    query = rope_input.to(device)[..., size : 2 * size]
    assert not query.is_contiguous()
    angles = angles_of(device, dim, 9, interleaved)
    out = apply_rotary_pos_emb(query, angles, tensor_format, True, ends, interleaved=interleaved)
    assert out.is_contiguous()
    result = out.transpose(0, 1) if tensor_format == "sbhd" else out.view(t.shape)
    exact = expected(t, dim, interleaved, positions)
    rounding = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(result.cpu().double(), exact, rtol=rounding, atol=2e-6)
    assert torch.equal(result[..., dim:].cpu(), t[..., dim:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_halves_may_have_angles_of_their_own(device, interleaved):
    """The backward is the transpose for any angles: <y, g> = <x, gradient of x>."""
    freqs = torch.randn(5, 1, 1, 16, device=device)
    x = torch.randn(5, 2, 3, 16, device=device, requires_grad=True)
    g = torch.randn_like(x)
    y = apply_rotary_pos_emb(x, freqs, fused=True, interleaved=interleaved)
    y.backward(g)
    plain = apply_rotary_pos_emb(x.detach(), freqs, interleaved=interleaved)
    torch.testing.assert_close(y, plain)
    back = float((x.detach() * x.grad).sum())
    assert float((y.detach() * g).sum()) == pytest.approx(back, rel=1e-4, abs=1e-4)


def test_large_angles(device):
    """Angles from 1 to 2^49, where neighbouring fp32 values are 10^7 revolutions apart."""
    angles = torch.logspace(0, 49, 64 * 16, base=2.0).view(64, 1, 1, 16)
    t = torch.randn(64, 1, 2, 16)
    out = apply_rotary_pos_emb(t.to(device), angles.to(device), fused=True)
    pairs, exact = t.double(), angles.double()
    other = torch.cat((-pairs[..., 8:], pairs[..., :8]), dim=-1)
    torch.testing.assert_close(
        out.cpu().double(), pairs * exact.cos() + other * exact.sin(), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "size"),
    [(1, 1, 128), (3, 5, 64), (2, 3, 96), (2, 40, 128), (1, 1, 2080), (1, 2, 516)],
)
def test_blocks_of_heads(device, batch_first, batch, heads, size):
    """A block takes heads of several tokens, some heads of a token, or a part of one head."""
    length = 37
    angles = torch.randn(length, size, device=device)
    shape = (batch, length, heads, size) if batch_first else (length, batch, heads, size)
    t = torch.randn(shape, device=device)
    out = apply_rotary_pos_emb(
        t, angles[:, None, None], "bshd" if batch_first else "sbhd", fused=True
    )
    place = (slice(None), slice(None), None) if batch_first else (slice(None), None, None)
    angle = (angles[None] if batch_first else angles)[place].double()
    x = t.double()
    other = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
    torch.testing.assert_close(
        out.double(), x * angle.cos() + other * angle.sin(), rtol=0, atol=4e-6
    )


@pytest.mark.gpu
def test_capture():
    t = torch.randn(8, 2, 4, 64, device="cuda", dtype=torch.bfloat16)
    angles = angles_of("cuda", 64, 8)
    apply_rotary_pos_emb(t, angles, fused=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply_rotary_pos_emb(t, angles, fused=True)
    t.copy_(torch.randn_like(t))
    graph.replay()
    assert torch.equal(out, apply_rotary_pos_emb(t, angles, fused=True))


def test_gradient_turns_back(device):
    t = torch.randn(2, 4, 3, 8, device=device, requires_grad=True)
    angles = angles_of(device, 8, 4)
    upstream = torch.randn_like(t)
    apply_rotary_pos_emb(t, angles, "bshd", True).backward(upstream)
    back = apply_rotary_pos_emb(upstream, -angles, "bshd", True)
    torch.testing.assert_close(t.grad, back)


def test_start_positions(device):
    t = torch.randn(2, 4, 3, 8)
    start = torch.tensor([3, 0], dtype=torch.int32, device=device)
    angles = angles_of(device, 8, 7)
    out = apply_rotary_pos_emb(t.to(device), angles, "bshd", True, start_positions=start)
    exact = expected(t, 8, False, [range(3, 7), range(4)])
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    of_sbhd = apply_rotary_pos_emb(
        t.transpose(0, 1).to(device), angles, "sbhd", True, start_positions=start
    )
    assert torch.equal(of_sbhd.transpose(0, 1), out)


@pytest.mark.parametrize("start", [None, [2, 5, 1]])
def test_packed(device, start):
    """Positions start anew with each sequence, one of which is empty."""
    t = torch.randn(1, 7, 2, 8)
    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=device)
    first = [0, 0, 0] if start is None else start
    rope_input = None if start is None else torch.tensor(start, dtype=torch.int32, device=device)
    out = apply_rotary_pos_emb(
        t[0].to(device), angles_of(device, 8, 6), "thd", True, ends, start_positions=rope_input
    )
    positions = [*range(first[0], first[0] + 3), *range(first[2], first[2] + 4)]
    exact = expected(t, 8, False, [positions])[0]
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_bad_arguments():
    t, angles = torch.randn(4, 2, 3, 8), angles_of("cpu", 8, 4)
    with pytest.raises(ValueError, match="at least 4 positions, got 3"):
        apply_rotary_pos_emb(t, angles[:3])
    with pytest.raises(ValueError, match="at most 6 elements, an even number, got 8"):
        apply_rotary_pos_emb(t[..., :6], angles)
    with pytest.raises(ValueError, match=r"tensor_format in \{sbhd, bshd, thd\}, got 'bhsd'"):
        apply_rotary_pos_emb(t, angles, "bhsd")
    with pytest.raises(ValueError, match="expected cu_seqlens"):
        apply_rotary_pos_emb(t[0], angles, "thd")
    with pytest.raises(ValueError, match="at least 8 positions, got 4"):
        apply_rotary_pos_emb(t, angles, cp_size=2)
    with pytest.raises(ValueError, match="cp_rank=2 and cp_size=2"):
        apply_rotary_pos_emb(t, angles, cp_size=2, cp_rank=2)
    starts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected start_positions=None"):
        apply_rotary_pos_emb(t[:2], angles, start_positions=starts, cp_size=2)
    with pytest.raises(ValueError, match=r"two chunks of equal length .* got 1 tokens"):
        apply_rotary_pos_emb(t[:1], angles, cp_size=2)
    ends = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"divisible by 4 .* got sequences of \[6\]"):
        apply_rotary_pos_emb(t[:3, 0], angles_of("cpu", 8, 6), "thd", cu_seqlens=ends, cp_size=2)
    with pytest.raises(ValueError, match="an even number of elements"):
        RotaryPositionEmbedding(7)
    with pytest.raises(ValueError, match="expected t of 4 dimensions"):
        apply_rotary_pos_emb(t[0], angles, fused=True)
    with pytest.raises(ValueError, match=r"freqs of shape .* got \(4, 2, 1, 8\)"):
        apply_rotary_pos_emb(t, angles.expand(4, 2, 1, 8))
    with pytest.raises(TypeError, match=r"expected freqs to be a torch.Tensor, got list"):
        apply_rotary_pos_emb(t, [0.0])
    with pytest.raises(TypeError, match=r"angles of floating point, got torch.complex64"):
        apply_rotary_pos_emb(t, torch.polar(torch.ones_like(angles), angles))
    for share, factor in ((1.5, None), (0.0, None), (1.0, 0.0), (1.0, -2.0)):
        with pytest.raises(ValueError, match=rf"in \(0, 1\] and .* got {share} and {factor}"):
            RotaryPositionEmbedding(8, share, factor)
    with pytest.raises(ValueError, match="expected max_seq_len >= 0, got -3"):
        RotaryPositionEmbedding(8)(-3)
    with pytest.raises(TypeError, match="expected max_seq_len to be an int, got 'a'"):
        RotaryPositionEmbedding(8)("a")


@pytest.mark.parametrize("fused", [False, True])
def test_bad_positions(fused):
    t, angles = torch.randn(8, 2, 8), angles_of("cpu", 8, 4)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"at least 5 positions, the longest .* got 4"):
        apply_rotary_pos_emb(t, angles, "thd", fused, ends)
    starts = torch.tensor([0, -5], dtype=torch.int32)
    for x, tensor_format in ((t, "thd"), (t.view(4, 2, 2, 8), "sbhd")):
        with pytest.raises(ValueError, match=r"start_positions >= 0, got \[0, -5\]"):
            apply_rotary_pos_emb(x, angles, tensor_format, fused, ends, start_positions=starts)


def test_freqs_may_leave_out_their_ones():
    t, angles = torch.randn(4, 4, 3, 8), angles_of("cpu", 8, 4)
    for fused in (False, True):
        assert torch.equal(
            apply_rotary_pos_emb(t, angles[:, 0, 0], fused=fused),
            apply_rotary_pos_emb(t, angles, fused=fused),
        )


def test_padding_may_lie_behind_the_last_angle():
    t, angles = torch.randn(3, 2, 2, 8), angles_of("cpu", 8, 4)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    rotated = [apply_rotary_pos_emb(t, angles, "sbhd", f, start_positions=starts) for f in (0, 1)]
    torch.testing.assert_close(*rotated)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_turns_its_tokens_as_one_that_has_all(device, ranks, tensor_format, fused):
    whole, starts = torch.randn(2, 16, 3, 8, device=device), None
    ends = torch.tensor([0, 8, 32], dtype=torch.int32, device=device)
    options = {"tensor_format": tensor_format, "fused": fused}
    if tensor_format == "thd":
        whole, starts = whole.flatten(0, 1), torch.tensor([3, 0], dtype=torch.int32, device=device)
        options |= {"cu_seqlens": ends, "start_positions": starts}
    elif tensor_format == "sbhd":
        whole = whole.transpose(0, 1)
    angles = angles_of(device, 6, 32)
    expected = apply_rotary_pos_emb(whole, angles, **options)
    dim = 1 if tensor_format == "bshd" else 0
    cuts = to_rank_order(whole, dim, ranks, ends if tensor_format == "thd" else None)
    found = [
        apply_rotary_pos_emb(cut, angles, cp_size=ranks, cp_rank=rank, **options)
        for rank, cut in enumerate(cuts)
    ]
    found = to_sequence_order(torch.stack(found), dim, ends if tensor_format == "thd" else None)
    assert torch.equal(found, expected)
