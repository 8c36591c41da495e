"""merge_parts on both backends: compared with the definition in float64, and special values."""

import math

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.merge_parts import merge_parts

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Dtypes of out and of the parts.
PAIRS = [(F32, F32), (F16, F16), (BF16, BF16), (F32, F16), (F32, BF16)]
# fp32 arithmetic: log-sum-exps up to 40 make the argument of exp wrong by 40 * 2^-24.
FP32_ERROR = 4e-6
NAN, INFINITY = float("nan"), float("inf")


def merge_attention(out, log_sum_exp, part, part_log_sum_exp):
    """Merges one part, which has all tokens."""
    merge_parts(out, log_sum_exp, [part], [part_log_sum_exp], [0])


def draw(shape, pair=(BF16, BF16), device="cpu"):
    """Random arguments. Shares of the softmax are between 0 and 1, some are exactly 0 or 1."""
    lead = shape[:-1]
    out, part = (torch.randn(shape).to(dtype) for dtype in pair)
    sums = torch.randn(2, *lead) * 8
    for value in (200.0, -INFINITY):
        sums[torch.rand(sums.shape) < 0.1] = value
    return [x.to(device) for x in (out, sums[0].clone(), part, sums[1].clone())]


def definition(out, log_sum_exp, part, part_log_sum_exp):
    """Merged values and log-sum-exps in float64, and a bound for fp32 errors of the values."""
    out, part = out.cpu().double(), part.cpu().double()
    both = torch.stack([log_sum_exp.cpu().double(), part_log_sum_exp.cpu().double()])
    total = both.logsumexp(0)
    weights = (both - total).exp().masked_fill(both == -INFINITY, 0.0)
    weights[0][total == -INFINITY] = 1.0
    own, of_part = weights.unsqueeze(-1)
    error = FP32_ERROR * (own.abs() * out.abs() + of_part.abs() * part.abs())
    near_one = (out.abs() + part.abs()) * 2.0**-22  # errors of the shares
    return own * out + of_part * part, total, error + near_one


def assert_close(out, log_sum_exp, expected):
    exact, total, error = expected
    info = torch.finfo(out.dtype)
    bound = error + exact.abs() * info.eps / 2 + info.tiny * info.eps
    assert ((out.cpu().double() - exact).abs() <= bound).all()
    found, total = (
        x.masked_fill(x == -INFINITY, INFINITY) for x in (log_sum_exp.cpu().double(), total)
    )
    torch.testing.assert_close(found, total, rtol=1e-6, atol=1e-6)


@pytest.mark.sanitize
@pytest.mark.parametrize("size", [8, 64, 96, 128, 256, 5, 1, 36, 300, 1030])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_definition(device, size, pair):
    """Rows read by 16 bytes or by single elements, by one lane or by lanes in several rounds."""
    arguments = draw((2, 7, 3, size), pair, device)
    expected = definition(*arguments)
    inputs = [x.clone() for x in arguments]
    merge_attention(*arguments)
    assert_close(*arguments[:2], expected)
    assert_bitwise(arguments[2], inputs[2])
    assert_bitwise(arguments[3], inputs[3])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_many_rows(device, pair):
    arguments = draw((3, 101, 13, 64), pair, device)
    expected = definition(*arguments)
    merge_attention(*arguments)
    assert_close(*arguments[:2], expected)


VIEWS = {
    "half of the first axis": lambda x: x.narrow(0, 2, 2),
    "half of the second axis": lambda x: x.narrow(1, 3, 4),
    "one of the first axis": lambda x: x.narrow(0, 1, 1),
    "heads before tokens": lambda x: x.transpose(1, 2),
    "sequence before batch": lambda x: x.transpose(0, 1),
    "every second head": lambda x: x[:, :, ::2],
}


@pytest.mark.sanitize
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("size", [128, 5])
def test_views(device, name, size):
    """Only elements of the view are written. Each tensor has different strides."""
    view = VIEWS[name]
    whole = draw((4, 8, 6, size), (F32, BF16), device)
    before = [x.clone() for x in whole]
    out, log_sum_exp, part, part_log_sum_exp = (view(x) for x in whole)
    lead = out.shape[:-1]
    part = part.movedim(2, 0).contiguous().movedim(0, 2)
    part_log_sum_exp = part_log_sum_exp.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert part.shape[:-1] == part_log_sum_exp.shape == lead and not part.is_contiguous()
    expected = definition(out, log_sum_exp, part, part_log_sum_exp)
    merge_attention(out, log_sum_exp, part, part_log_sum_exp)
    assert_close(out, log_sum_exp, expected)
    for now, then in zip(whole[:2], before[:2], strict=True):
        view(now).copy_(view(then))
        assert_bitwise(now, then)


@pytest.mark.parametrize("gap", [0, 1, 3, 8])
def test_any_alignment(device, gap):
    """Memory and rows that do not begin at multiples of 16 bytes are read by single elements."""
    out, log_sum_exp, part, part_log_sum_exp = draw((1, 9, 2, 64), device=device)
    room = torch.zeros(gap + 18 * (64 + gap), dtype=BF16, device=device)
    places = room[gap:].view(1, 9, 2, 64 + gap)[..., :64]
    places.copy_(out)
    expected = definition(out, log_sum_exp, part, part_log_sum_exp)
    merge_attention(places, log_sum_exp, part, part_log_sum_exp)
    assert_close(places, log_sum_exp, expected)
    room[gap:].view(1, 9, 2, 64 + gap)[..., :64] = 0
    assert not room.any()


def test_packed_tokens(device):
    arguments = draw((11, 3, 64), device=device)
    expected = definition(*arguments)
    merge_attention(*arguments)
    assert_close(*arguments[:2], expected)


@pytest.mark.parametrize("part_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("size", [64, 5])
def test_parts_are_those_of_one_attention(device, size, part_dtype):
    """Merges three parts of the keys into a result without keys; some queries see two parts."""
    q, k, v = (torch.randn(count, 2, size, dtype=torch.float64) for count in (6, 10, 10))
    scores = torch.einsum("qhd,khd->qhk", q, k) / math.sqrt(size)
    scores[:4, :, 3:7] = -INFINITY
    out = torch.full((6, 2, size), NAN, device=device)
    log_sum_exp = torch.full((6, 2), -INFINITY, device=device)
    for keys in (slice(0, 3), slice(3, 7), slice(7, 10)):
        weights = torch.softmax(scores[..., keys], -1)  # NaN where no key is seen
        part = torch.einsum("qhk,khd->qhd", weights, v[keys]).to(device, part_dtype)
        merge_attention(out, log_sum_exp, part, scores[..., keys].logsumexp(-1).float().to(device))
    exact = torch.einsum("qhk,khd->qhd", torch.softmax(scores, -1), v)
    error = 1e-5 if part_dtype is F32 else 0.02
    torch.testing.assert_close(out.cpu().double(), exact, rtol=0, atol=error)
    torch.testing.assert_close(
        log_sum_exp.cpu().double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6
    )


# Log-sum-exps of out and of the part, which of the two values is the result, merged log-sum-exp.
EDGES = {
    "no key in the part": (1.5, -INFINITY, "out", 1.5),
    "no key so far": (-INFINITY, 1.5, "part", 1.5),
    "no key at all": (-INFINITY, -INFINITY, "out", INFINITY),
    "a part of no weight": (300.0, 1.0, "out", 300.0),
    "a part of all weight": (1.0, 300.0, "part", 300.0),
    "no key so far, by +Inf": (INFINITY, 1.5, "part", 1.5),
    "no key in the part, by +Inf": (1.5, INFINITY, "out", 1.5),
    "no key at all, by +Inf": (INFINITY, INFINITY, "out", INFINITY),
    "NaN": (NAN, 1.0, "NaN", NAN),
    "NaN, and no key in the part": (NAN, -INFINITY, "out", NAN),
    "NaN in the part": (1.0, NAN, "NaN", NAN),
    "NaN in the part, and no key so far": (-INFINITY, NAN, "part", NAN),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("size", [64, 5])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_edges(device, name, size, pair):
    """The tensor with a share of zero holds NaN and infinities, which must have no effect."""
    own, of_part, taken, total = EDGES[name]
    shape = (1, 2, 2, size)
    out, part = (torch.randn(shape).to(dtype) for dtype in pair)
    wanted = {"out": out.clone(), "part": part.to(out.dtype)}.get(taken, torch.full_like(out, NAN))
    if taken == "out":
        part.view(-1)[::2], part.view(-1)[1::2] = NAN, INFINITY
    if taken == "part":
        out.view(-1)[::2], out.view(-1)[1::2] = NAN, -INFINITY
        part.view(-1)[0] = wanted.view(-1)[0] = -0.0
    sums, part_sums = torch.full(shape[:-1], own), torch.full(shape[:-1], of_part)
    out, sums, part, part_sums = (x.to(device) for x in (out, sums, part, part_sums))
    merge_attention(out, sums, part, part_sums)
    assert_bitwise(out.masked_fill(out.isnan(), NAN), wanted)
    assert_bitwise(sums.masked_fill(sums.isnan(), NAN), torch.full(shape[:-1], total))


def test_equal_sums_take_half_of_each(device):
    out, part = torch.tensor([[[1.0]]], device=device), torch.tensor([[[4.0]]], device=device)
    sums = torch.tensor([[2.0]], device=device)
    merge_attention(out, sums, part, sums.clone())
    assert out.item() == 2.5
    assert sums.item() == pytest.approx(2 + math.log(2), rel=1e-6)


def test_a_part_may_be_the_result_itself(device):
    out, sums, *_ = draw((1, 40, 3, 64), (F32, F32), device)
    expected = definition(out, sums, out, sums)
    merge_attention(out, sums, out, sums)
    assert_close(out, sums, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("size", [128, 5])
def test_both_backends_round_alike(size, pair):
    """The arithmetic of both backends is the same, except for the function exp."""
    arguments = draw((1, 50, 4, size), pair)
    moved = [x.cuda() for x in arguments]
    merge_attention(*arguments)
    merge_attention(*moved)
    error = 2 * torch.finfo(pair[0]).eps
    torch.testing.assert_close(moved[0].cpu(), arguments[0], rtol=error, atol=1e-6)
    torch.testing.assert_close(moved[1].cpu(), arguments[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (0, 3, 8)], ids=str)
def test_no_rows(device, shape):
    merge_attention(*draw(shape, device=device))


def test_rows_without_elements_have_sums(device):
    arguments = draw((1, 4, 2, 0), device=device)
    expected = definition(*arguments)
    merge_attention(*arguments)
    assert_close(*arguments[:2], expected)


# For results of 8 tokens: the first token of each part, and its number of tokens.
RANGES = [[(0, 8)], [(0, 8), (4, 4), (0, 4)], [(4, 4), (0, 8), (2, 3), (7, 1)], [(1, 2)]]


def of_ranges(test):
    """Runs a test for all ranges and both token axes, with and without old values in `out`."""
    cases = {"ranges": RANGES, "pair": PAIRS, "size": [64, 5], "axis": [0, 1]}
    for name, values in {**cases, "fresh": [False, True]}.items():
        test = pytest.mark.parametrize(name, values, ids=str)(test)
    return test


def draw_parts(ranges, axis, size, pair, device):
    """`out` with 8 tokens on an axis, its log-sum-exps, parts, and the parts' log-sum-exps."""
    shape = [3, 3, 2, size]
    shape[axis] = 8
    out, sums, *_ = draw(shape, pair)
    parts, part_sums = [], []
    for _, tokens in ranges:
        shape[axis] = tokens
        _, _, part, part_sum = draw(shape, pair)
        parts.append(part.to(device))
        part_sums.append(part_sum.to(device))
    return out.to(device), sums.to(device), parts, part_sums


@pytest.mark.sanitize
@of_ranges
def test_parts_of_ranges(device, ranges, pair, size, axis, fresh):
    out, sums, parts, part_sums = draw_parts(ranges, axis, size, pair, device)
    shape = list(out.shape)
    summands, all_sums = [], []
    if not fresh:
        summands, all_sums = [out.cpu().double()], [sums.cpu().double()]
    for (begin, tokens), part, part_sum in zip(ranges, parts, part_sums, strict=True):
        wide = torch.zeros(shape, dtype=torch.float64)
        wide.narrow(axis, begin, tokens).copy_(part)
        total = torch.full(shape[:-1], -INFINITY, dtype=torch.float64)
        total.narrow(axis, begin, tokens).copy_(part_sum)
        summands.append(wide)
        all_sums.append(total)
    total = torch.stack(all_sums).logsumexp(0)
    weights = (torch.stack(all_sums) - total).exp().nan_to_num(0.0).unsqueeze(-1)
    stack = torch.stack(summands)
    exact, error = (weights * stack).sum(0), (weights * stack.abs()).sum(0) * FP32_ERROR
    if not fresh:  # out stays the same for queries that see no key
        exact = torch.where(total.isinf().unsqueeze(-1), summands[0], exact)
    else:
        out.fill_(NAN), sums.fill_(NAN)
    begins = [begin for begin, _ in ranges]
    merge_parts(out, sums, parts, part_sums, begins, axis, fresh)
    assert_close(out, sums, (exact, total, error))


@of_ranges
def test_sums(device, ranges, pair, size, axis, fresh):
    out, _, parts, _ = draw_parts(ranges, axis, size, pair, device)
    expected = torch.zeros_like(out, dtype=F32) if fresh else out.float()
    for (begin, tokens), part in zip(ranges, parts, strict=True):
        expected.narrow(axis, begin, tokens).add_(part)
    if fresh:
        out.fill_(NAN)
    merge_parts(out, None, parts, [], [begin for begin, _ in ranges], axis, fresh)
    assert_bitwise(out, expected.to(out.dtype))


def test_a_sum_of_one_part_has_its_bits(device):
    part = torch.tensor([-0.0, 0.0, NAN, -INFINITY], device=device).view(1, 1, 1, 4)
    out = torch.empty_like(part)
    merge_parts(out, None, [part], [], [0], fresh=True)
    assert_bitwise(out, part)


def test_compiles(device):
    def twice(out, log_sum_exp, part, part_log_sum_exp):
        whole, sums = out * 2, log_sum_exp + 1
        merge_attention(whole[:, 1:], sums[:, 1:], part, part_log_sum_exp)
        merge_attention(whole[:, 1:], sums[:, 1:], part, part_log_sum_exp)
        return whole + 1, sums

    out, sums, *_ = draw((2, 5, 3, 8), device=device)
    _, _, part, part_sums = draw((2, 4, 3, 8), device=device)
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        compiled(out, sums, part, part_sums), twice(out, sums, part, part_sums), strict=True
    ):
        assert_bitwise(a, b)


@pytest.mark.gpu
def test_capture():
    out, sums, part, part_sums = draw((1, 20, 4, 64), device="cuda")
    eager = [out.clone(), sums.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_attention(out, sums, part, part_sums)
    graph.replay()
    merge_attention(*eager, part, part_sums)
    assert_bitwise(out, eager[0])
    assert_bitwise(sums, eager[1])
