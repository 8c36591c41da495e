"""DotProductAttention against the definition: formats, masks, heads, biases, backends, errors."""

from dataclasses import dataclass, replace

import pytest
import reference_attention as reference
import torch
from pytorch.cases.attention import BACKENDS, cu_seqlens
from pytorch.cases.attention import module as make_module
from pytorch.cases.attention import qkv as make_qkv
from torch.nn.functional import pad

from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.alibi import default_slopes

BATCH, HEADS = 3, 4
# Relative error of a result in the norm, against float64 on the same inputs: a few roundings of the
# dtype (scores, weights, result) in sequence.
BOUND = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    mask_type: str = "no_mask"
    qkv_format: str = "sbhd"
    dtype: torch.dtype = torch.float32
    queries: int = 7
    keys: int = 7
    groups: int = HEADS
    size: int = 16
    value_size: int = 16
    window: tuple[int, int] | None = None
    bias: str = "no_bias"
    bias_shape: tuple[int, int] = (BATCH, HEADS)

    def __str__(self):
        default = Case()
        changed = [v for k, v in vars(self).items() if v != getattr(default, k)]
        return "-".join(str(v).replace("torch.", "") for v in changed) or "default"

    @property
    def lengths(self):
        """Real queries and keys: full, shorter, and without any token."""
        return [(self.queries, self.keys), (self.queries - 3, self.keys - 1), (0, 0)]


CROSS = {"queries": 5, "keys": 9}
CASES = [
    Case(),
    Case("causal"),
    Case("causal", dtype=torch.bfloat16, qkv_format="bshd"),
    Case("causal", dtype=torch.float16, groups=2),
    Case("no_mask", **CROSS, groups=1),
    Case("no_mask", **CROSS, value_size=8, qkv_format="bshd"),
    Case("causal", **CROSS, qkv_format="bshd"),
    Case("causal", queries=9, keys=5),
    Case("causal_bottom_right", **CROSS),
    Case("causal_bottom_right", queries=9, keys=5, dtype=torch.bfloat16),  # blind queries
    Case("no_mask", window=(2, 1)),
    Case("no_mask", **CROSS, window=(1, -1), groups=2),
    Case("causal", window=(2, 0), dtype=torch.bfloat16),
    Case("padding"),
    Case("padding", **CROSS, qkv_format="bshd", dtype=torch.bfloat16),
    Case("padding", **CROSS, window=(2, 2)),
    Case("padding_causal", qkv_format="bshd", groups=2),
    Case("padding,causal", dtype=torch.float16),
    Case("padding_causal_bottom_right", **CROSS, window=(3, 0)),
    Case("arbitrary"),
    Case("arbitrary", **CROSS, qkv_format="bshd", groups=2, value_size=24, dtype=torch.bfloat16),
    Case("arbitrary", window=(2, 2)),
    Case("padding", qkv_format="thd"),
    Case("padding_causal", qkv_format="thd", groups=2, dtype=torch.bfloat16),
    Case("padding_causal_bottom_right", **CROSS, qkv_format="thd", value_size=8),
    Case("padding", **CROSS, qkv_format="thd", window=(1, 1)),
    Case("no_mask", bias="post_scale_bias"),
    Case("causal", bias="pre_scale_bias", bias_shape=(1, HEADS), groups=2),
    Case("padding", bias="post_scale_bias", bias_shape=(BATCH, 1), dtype=torch.bfloat16),
    Case("arbitrary", bias="post_scale_bias", bias_shape=(1, 1), qkv_format="bshd"),
    Case("causal", bias="alibi"),
    Case("no_mask", **CROSS, bias="alibi", qkv_format="bshd", dtype=torch.bfloat16),
    Case("padding", **CROSS, bias="alibi"),
    Case("padding_causal", bias="alibi", qkv_format="thd"),
]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    for name, value in BACKENDS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


def to_format(x, qkv_format, lengths):
    """`[batch, sequence, ...]` in a format; thd keeps the real tokens."""
    if qkv_format == "sbhd":
        return x.transpose(0, 1).contiguous()
    if qkv_format == "bshd":
        return x.contiguous()
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def from_format(x, qkv_format, lengths, longest):
    """Back to `[batch, sequence, ...]`, zero where thd has no token."""
    if qkv_format == "sbhd":
        return x.transpose(0, 1)
    if qkv_format == "bshd":
        return x
    unpadded = (0, 0) * (x.dim() - 1)
    parts = x.split(list(lengths))
    return torch.stack([pad(part, (*unpadded, 0, longest - len(part))) for part in parts])


@dataclass
class Prepared:
    """Inputs in the case's format, arguments of forward, and what is expected of them."""

    inputs: list
    arguments: dict
    seen: torch.Tensor
    lengths: tuple


def make_mask(case, lengths, device):
    """Arguments that say the mask, and the reference's seen keys."""
    arbitrary = None
    arguments = {}
    of_query, of_key = lengths
    if case.mask_type == "arbitrary":
        arbitrary = torch.rand(BATCH, 1, case.queries, case.keys) < 0.3
        arbitrary[0, 0, 1] = True  # a query that sees nothing
        arguments["attention_mask"] = arbitrary.to(device)
    elif case.qkv_format == "thd":
        arguments["cu_seqlens_q"] = cu_seqlens(of_query, device)
        arguments["cu_seqlens_kv"] = cu_seqlens(of_key, device)
    elif "padding" in case.mask_type:
        masks = [
            torch.tensor([[j >= n for j in range(size)] for n in side]).view(BATCH, 1, 1, size)
            for side, size in ((of_query, case.queries), (of_key, case.keys))
        ]
        masks = [mask.to(device) for mask in masks]
        arguments["attention_mask"] = tuple(masks) if of_query != of_key else masks[0]
    name = "padding_causal" if "," in case.mask_type else case.mask_type
    pairs = list(zip(of_query, of_key, strict=True))
    seen = reference.seen_keys(name, case.window, case.queries, case.keys, pairs, arbitrary)
    return arguments, seen


def make_problem(case, device):
    of_query, of_key = zip(*case.lengths, strict=True)
    if case.queries == case.keys:
        of_key = of_query
    arguments, seen = make_mask(case, (of_query, of_key), device)
    shapes = [
        (case.queries, HEADS, case.size),
        (case.keys, case.groups, case.size),
        (case.keys, case.groups, case.value_size),
    ]
    padded = [torch.randn(BATCH, *shape).to(case.dtype) for shape in shapes]
    if case.qkv_format == "thd":  # what is not a token has no value
        for x, lengths in zip(padded, (of_query, of_key, of_key), strict=True):
            for row, length in zip(x, lengths, strict=True):
                row[length:] = 0
    return Prepared(padded, arguments, seen, (of_query, of_key))


def norm_error(actual, expected):
    actual, expected = actual.detach().double().cpu(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_definition(device, backend, case):
    if backend == "sdpa" and case.bias != "no_bias":
        pytest.skip("torch's attention takes no bias here")
    problem = make_problem(case, device)
    of_query, of_key = problem.lengths
    exact = [x.double().requires_grad_() for x in problem.inputs]
    sides = (of_query, of_key, of_key)
    given = [
        to_format(x, case.qkv_format, side).to(device).requires_grad_()
        for x, side in zip(problem.inputs, sides, strict=True)
    ]
    arguments = dict(problem.arguments)
    biases = {}
    if case.bias == "alibi":
        pairs = list(zip(of_query, of_key, strict=True))
        if "padding" not in case.mask_type:
            pairs = [(case.queries, case.keys)] * BATCH
        biases["post_bias"] = reference.alibi(
            reference.slopes_of(HEADS), case.queries, case.keys, pairs
        )
    elif case.bias != "no_bias":
        bias = torch.randn(*case.bias_shape, case.queries, case.keys).to(case.dtype)
        exact_bias = bias.double().requires_grad_()
        biases[case.bias.replace("_scale", "")] = exact_bias
        arguments["core_attention_bias"] = bias.to(device).requires_grad_()
    module = DotProductAttention(
        HEADS,
        (case.size, case.value_size),
        case.groups,
        qkv_format=case.qkv_format,
        attn_mask_type=case.mask_type,
        window_size=case.window,
    )
    out = module(*given, core_attention_bias_type=case.bias, **arguments)
    expected = reference.attention(*exact, problem.seen, **biases)
    assert out.dtype is case.dtype
    assert out.shape == (*given[0].shape[:-2], HEADS * case.value_size)
    unflat = out.view(*given[0].shape[:-2], HEADS, case.value_size)
    result = from_format(unflat, case.qkv_format, of_query, case.queries)
    assert norm_error(result, expected) < BOUND[case.dtype]
    blind, unseen = (~problem.seen.any(axis)[:, 0] for axis in (-1, -2))
    assert int(result.detach().cpu()[blind].count_nonzero()) == 0

    upstream = torch.randn(expected.shape).to(case.dtype)
    expected.backward(upstream.double())
    result.backward(upstream.to(device))
    longest = (case.queries, case.keys, case.keys)
    apart = (blind, unseen, unseen)
    for x, e, side, size, none in zip(given, exact, sides, longest, apart, strict=True):
        grad = from_format(x.grad, case.qkv_format, side, size)
        assert norm_error(grad, e.grad) < 2 * BOUND[case.dtype]
        assert int(grad.cpu()[none].count_nonzero()) == 0
    if "core_attention_bias" in arguments:
        grad = arguments["core_attention_bias"].grad
        assert grad.shape == exact_bias.shape
        assert norm_error(grad, exact_bias.grad) < 2 * BOUND[case.dtype]


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
    # Bitwise on the CPU; on a GPU the strides may choose the GEMM.
    bound = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(sbhd.transpose(0, 1), bshd, **bound)
    torch.testing.assert_close(thd, torch.cat((bshd[0, :3], bshd[1])), **bound)


def test_room_between_sequences(device, backend):
    """thd with gaps: the same tokens attend, and the gaps come out zero and pass no gradient."""
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
@pytest.mark.parametrize("case", [Case("causal"), Case("no_mask", groups=2)], ids=str)
def test_cudnn_runs_on_hopper(case):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN is the fastest from Hopper on")
    case = replace(case, dtype=torch.bfloat16, queries=256, keys=256, size=128, value_size=128)
    problem = make_problem(case, "cuda")
    inputs = [x.transpose(0, 1).contiguous().cuda().requires_grad_() for x in problem.inputs]
    module = DotProductAttention(HEADS, 128, case.groups, attn_mask_type=case.mask_type)
    order = torch._C._get_sdp_priority_order()
    module(*inputs)
    with torch.profiler.profile() as profile:
        module(*inputs)
    names = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_cudnn_attention" in names
    assert "aten::clone" not in names, "flat heads are a view, and nothing else is copied"
    assert torch._C._get_sdp_priority_order() == order
