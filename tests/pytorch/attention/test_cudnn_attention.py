"""The cuDNN backend against the definition in float64: formats, masks, windows, heads, extras."""

from dataclasses import dataclass
from itertools import accumulate

import attention_reference as reference
import pytest
import torch
from cases.cudnn_attention import CASES, CROSS, LONGEST, SELF, Case

import transformer_engine.pytorch as te
from transformer_engine import _C
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import cudnn, cudnn_sizes
from transformer_engine.pytorch.attention.core.call import (
    NO_SINK,
    Call,
    Dropout,
    Sequences,
    Sink,
    bias_of,
    call_shape,
)

pytestmark = pytest.mark.gpu

BOUND = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def _cudnn_alone(monkeypatch):
    monkeypatch.setattr(core, "choose", lambda *call: cudnn.BACKEND)


def make(case, device="cuda"):
    """Returns query, key and value, bias, sink, the call, and the `Batches` of the case."""
    sides = [[pair[i] for pair in case.lengths] for i in (0, 1)]
    longest = (case.queries, case.keys)
    starts = [[0, *accumulate(n + case.room for n in side)] for side in sides]
    tokens = [(s[-1] + 3,) for s in starts]  # three tokens belong to no sequence
    lead = {
        "sbhd": lambda i: (longest[i], case.batch),
        "bshd": lambda i: (case.batch, longest[i]),
        "thd": lambda i: tokens[i],
    }[case.qkv_format]
    heads = (case.heads, case.groups, case.groups)
    if case.packed == "heads":
        x = torch.randn(*lead(0), case.heads, 3, case.size, device=device, dtype=case.dtype)
        tensors = x.unbind(-2)
    elif case.packed:
        x = torch.randn(*lead(0), sum(heads), case.size, device=device, dtype=case.dtype)
        tensors = x.split(heads, -2)
    else:
        tensors = [
            torch.randn(*lead(min(i, 1)), heads[i], size, device=device, dtype=case.dtype)
            for i, size in enumerate((case.size, case.size, case.value_size))
        ]
    tensors = [x.detach().requires_grad_() for x in tensors]
    bias = sink = None
    if case.bias:
        shape = (*case.bias, case.queries, case.keys)
        bias = torch.randn(shape, device=device, dtype=case.dtype).requires_grad_()
    if case.sink:
        sink = torch.randn(case.heads, device=device).requires_grad_()
    shape = call_shape(
        case.qkv_format,
        (case.heads, case.groups),
        (case.size, case.value_size),
        tuple(x.shape for x in tensors),
        case.mask_type,
        case.window,
        None,
    )
    sequences = [Sequences(), Sequences()]
    if case.lengths:
        ends = [on_gpu([0, *accumulate(side)]) for side in sides]
        padded = [on_gpu(s) if case.room else None for s in starts]
        of = list(zip(ends, padded, longest, strict=True))
        sequences = [Sequences(*of[0]), Sequences(*of[0 if case.lengths == SELF else 1])]
    call = Call(
        shape,
        None,
        *sequences,
        bias_of(case.bias_type, bias, None),
        case.size**-0.5,
        Dropout(),
        False,
        NO_SINK if sink is None else Sink("learnable", sink),
    )
    return tensors, bias, sink, call, Batches(case, starts, longest)


def on_gpu(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


@dataclass
class Batches:
    """Converts a format to `[batch, sequence, ...]` in float64 and back; padding of thd is zero."""

    case: Case
    starts: list
    longest: tuple

    def of(self, x, side):
        """Returns `[batch, sequence, ...]`."""
        if self.case.qkv_format != "thd":
            return (x.transpose(0, 1) if self.case.qkv_format == "sbhd" else x).double()
        out = x.new_zeros(self.case.batch, self.longest[side], *x.shape[1:], dtype=torch.float64)
        for row, start, pair in zip(out, self.starts[side], self.case.lengths, strict=False):
            row[: pair[side]] = x[start : start + pair[side]].double()
        return out

    def back(self, x, side, like):
        """Converts `[batch, sequence, ...]` to the format."""
        if self.case.qkv_format != "thd":
            return x.transpose(0, 1) if self.case.qkv_format == "sbhd" else x
        out = torch.zeros_like(like, dtype=torch.float64)
        for row, start, pair in zip(x, self.starts[side], self.case.lengths, strict=False):
            out[start : start + pair[side]] = row[: pair[side]]
        return out


def expected(case, tensors, bias, sink, batches, grad):
    """Returns result and gradients by the definition, in the format."""
    whole = [(case.queries, case.keys)] * case.batch
    seen = reference.seen_keys(
        case.mask_type, case.window, case.queries, case.keys, case.lengths or whole
    ).cuda()
    inputs = [batches.of(x.detach(), min(i, 1)).requires_grad_() for i, x in enumerate(tensors)]
    added = None if bias is None else bias.detach().double().requires_grad_()
    score = None if sink is None else sink.detach().double().requires_grad_()
    post_bias = added
    if case.bias_type == "alibi":
        post_bias = reference.alibi(reference.slopes_of(case.heads), case.queries, case.keys, whole)
        post_bias = post_bias.cuda()
    out = with_sink(inputs, seen, post_bias, score, case)
    leaves = [x for x in (*inputs, added, score) if x is not None]
    grads = torch.autograd.grad(out, leaves, batches.of(grad, 0))
    sides = (0, 1, 1)
    back = [batches.back(g, s, x) for g, s, x in zip(grads, sides, tensors, strict=False)]
    return [batches.back(out.detach(), 0, grad), *back, *grads[3:]]


def with_sink(inputs, seen, bias, sink, case):
    if sink is None:
        return reference.attention(*inputs, seen, post_bias=bias)
    # The sink is one more key: its score is given by the bias, its value is zero.
    query, key, value = inputs
    added = sink.view(1, -1, 1, 1).expand(case.batch, -1, case.queries, 1)
    if bias is None:
        bias = added.new_zeros(case.batch, case.heads, case.queries, case.keys)
    key, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
    seen = torch.nn.functional.pad(seen, (0, 1), value=True)
    return reference.attention(query, key, value, seen, post_bias=torch.cat((bias, added), -1))


def assert_close(actual, wanted, dtype, name):
    assert actual.shape == wanted.shape, name
    assert bool(actual.isfinite().all()), name
    error = (actual.detach().double() - wanted).norm() / wanted.norm().clamp_min(1e-3)
    assert float(error) < BOUND[dtype], f"{name}: {float(error)}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_and_gradients(case):
    tensors, bias, sink, call, batches = make(case)
    out = core.CoreAttention()(*tensors, call)
    grad = torch.randn_like(out).unflatten(-1, (case.heads, case.value_size))
    leaves = [x for x in (*tensors, bias, sink) if x is not None]
    grads = torch.autograd.grad(out, leaves, grad.flatten(-2))
    wanted = expected(case, tensors, bias, sink, batches, grad)
    names = ("out", "query", "key", "value", "bias" if bias is not None else "sink")
    for name, actual, by_definition in zip(
        names, (out.view_as(grad), *grads), wanted, strict=False
    ):
        assert_close(actual, by_definition, case.dtype, name)


SHARED = [
    *[case for case in CASES if not (case.lengths or case.bias or case.sink or case.queries <= 40)],
    *(
        Case("causal", form, packed=kind, queries=n, keys=n)
        for form, kind, n in (("sbhd", "heads", 77), ("bshd", "whole", 200), ("bshd", "", 321))
    ),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_result_and_gradients_of_graphs_for_similar_sizes(case, monkeypatch):
    monkeypatch.setattr(cudnn, "lengths_to_share", lambda *facts: (case.queries, case.keys))
    test_result_and_gradients(case)


@pytest.mark.sanitize
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_padding_and_blind_queries_are_zero_and_pass_nothing(qkv_format):
    case = Case("padding_causal_bottom_right", qkv_format, lengths=CROSS)
    tensors, _, _, call, batches = make(case)
    out = core.CoreAttention()(*tensors, call)
    grads = torch.autograd.grad(out, tensors, torch.full_like(out, 1e3))
    seen = reference.seen_keys(case.mask_type, None, LONGEST, LONGEST, CROSS)
    ones = torch.ones(case.batch, LONGEST, 1, 1, device="cuda")
    alive = [seen.any(3)[:, 0, :, None, None], seen.any(2)[:, 0, :, None, None]]
    for x, side in ((out.unflatten(-1, (4, 64)), 0), (grads[0], 0), (grads[1], 1), (grads[2], 1)):
        dead = batches.back((ones * ~alive[side].cuda()).double(), side, x[..., :1, :1])
        outside = batches.back(ones.double(), side, x[..., :1, :1]) == 0
        assert bool((x * ((dead != 0) | outside) == 0).all())


def test_a_call_of_known_shapes_builds_no_graph():
    tensors, _, _, call, _ = make(Case("causal"))
    core.CoreAttention()(*tensors, call).sum().backward()
    count = _C.attention_graph_count()
    core.CoreAttention()(*tensors, call).sum().backward()
    assert _C.attention_graph_count() == count


def test_sequences_of_similar_lengths_share_a_graph():
    module = DotProductAttention(4, 64, qkv_format="thd", attn_mask_type="padding_causal")

    def run(lengths):
        ends = on_gpu([0, *accumulate(lengths)])
        qkv = torch.randn(3, sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16)
        qkv.requires_grad_()
        longest = max(lengths)
        module(
            *qkv.unbind(0),
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ).sum().backward()

    run([60, 30, 50, 64, 20, 10, 9, 1, 2])
    count = _C.attention_graph_count()
    run([63, 31, 40, 61, 25, 11, 10, 3, 3, 2])
    assert _C.attention_graph_count() == count


@pytest.mark.parametrize("mask_type", ["causal", "padding_causal"])
def test_batches_of_many_lengths_build_a_few_graphs(mask_type):
    """The first sizes have their own, unless they are padded; then 64, 80, 96, ..."""
    module = DotProductAttention(2, 64, qkv_format="bshd", attn_mask_type=mask_type)
    lengths = range(65, 130)

    def step(tokens):
        ends = on_gpu([tokens * i for i in range(4)]) if "padding" in mask_type else None
        qkv = torch.randn(3, 3, tokens, 2, 64, device="cuda", dtype=torch.bfloat16)
        qkv.requires_grad_()
        module(*qkv.unbind(0), cu_seqlens_q=ends, cu_seqlens_kv=ends).sum().backward()
        return qkv.grad

    before = _C.attention_graph_count()
    for tokens in lengths:
        step(tokens)
    built = _C.attention_graph_count() - before
    assert built <= 2 * (5 + ("padding" not in mask_type) * cudnn_sizes.MOST_OWN_GRAPHS)
    for tokens in lengths:
        assert bool(step(tokens).isfinite().all())
    assert _C.attention_graph_count() == before + built


def dropped(seed, p=0.25):
    """Returns 256 times the weights of 64 keys after dropout; before dropout all are 1/256."""
    torch.manual_seed(seed)
    query = torch.zeros(1, 256, 1, 64, device="cuda", dtype=torch.bfloat16)
    value = torch.eye(256, 64, device="cuda", dtype=torch.bfloat16)[None, :, None]
    module = DotProductAttention(1, 64, attention_dropout=p, qkv_format="bshd")
    return module(query, query, value, attn_mask_type="no_mask")[0] * 256


def test_dropout_drops_its_share_and_scales_the_rest():
    weights = dropped(0)
    surviving = weights != 0
    assert abs(float(surviving.float().mean()) - 0.75) < 0.02
    assert torch.allclose(weights[surviving].float(), torch.tensor(4 / 3, device="cuda"), rtol=1e-2)


def test_dropout_follows_torchs_generator():
    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))


def test_dropout_drops_the_same_weights_in_the_backward():
    module = DotProductAttention(
        1, 64, attention_dropout=0.5, qkv_format="bshd", attn_mask_type="no_mask"
    )
    zeros = torch.zeros(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
    value = torch.eye(64, device="cuda", dtype=torch.bfloat16)[None, :, None].requires_grad_()
    out = module(zeros, zeros, value)  # row i holds the weights of query i
    grad = torch.randn_like(out)
    (value_grad,) = torch.autograd.grad(out, value, grad)
    wanted = out[0].detach().double().T @ grad[0].double()
    assert_close(value_grad[0, :, 0], wanted, torch.bfloat16, "value")


def test_deterministic_gradients_repeat():
    case = Case("causal", queries=512, keys=512, groups=2)
    tensors, _, _, call, _ = make(case)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(core.CoreAttention()(*tensors, call).sum(), tensors)
            for _ in range(3)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_a_captured_graph_replays_new_inputs_and_lengths(qkv_format):
    case = Case("padding_causal", qkv_format, lengths=((64, 64), (32, 32)))
    tensors, _, _, call, _ = make(case)

    def step():
        out = core.CoreAttention()(*tensors, call)
        return out, *torch.autograd.grad(out.float().square().sum(), tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in tensors:
            x.normal_()
        for ends in (call.query_sequences.cu_seqlens, call.key_sequences.cu_seqlens):
            ends.copy_(on_gpu([0, 40, 96]))
    graph.replay()
    for actual, eager in zip(captured, step(), strict=True):
        assert torch.equal(actual, eager)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_that_would_be_built_inside_a_capture_is_an_error():
    tensors, _, _, call, _ = make(Case("causal", queries=88, keys=88))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warm-up"), torch.cuda.graph(graph):
        core.CoreAttention()(*tensors, call)


def test_the_table_tells_what_cudnn_refuses(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "1")  # puts cuDNN first
    call_kwargs = {
        "dtype": torch.bfloat16,
        "device": "cuda",
        "max_seqlen_q": 128,
        "max_seqlen_kv": 64,
    }
    table = te.attention_backends(attn_mask_type="causal_bottom_right", **call_kwargs)
    assert "cuDNN 9" in table["cudnn"] and "Bottom right" in table["cudnn"]
    assert te.attention_backends(**call_kwargs).chosen == "cudnn"


@pytest.mark.parametrize("mask_type", ["causal", "padding_causal"])
def test_compiled(mask_type):
    padding = "padding" in mask_type
    ends = on_gpu([0, 50, 114])
    call_kwargs = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} if padding else {}
    module = DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type=mask_type)
    shape = (2, 64, 4, 64)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    qkv = [x.requires_grad_() for x in qkv]
    results = []
    for function in (module, torch.compile(module, fullgraph=True)):
        out = function(*qkv, **call_kwargs)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), qkv)))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_memory_that_cudnn_cannot_read_is_copied():
    tensors, _, _, call, _ = make(Case("causal"))
    shifted = []
    for x in tensors:
        memory = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
        shifted.append(memory[1:].view_as(x).copy_(x.detach()))
    assert torch.equal(core.CoreAttention()(*shifted, call), core.CoreAttention()(*tensors, call))


def test_bias_that_cudnn_cannot_read_is_copied():
    tensors, bias, _, call, _ = make(Case("no_mask", bias=(1, 4), bias_type="post_scale_bias"))
    memory = torch.empty(bias.numel() + 1, device="cuda", dtype=bias.dtype)
    shifted = memory[1:].view_as(bias).copy_(bias.detach()).requires_grad_()
    results = []
    for one in (bias, shifted):
        out = core.CoreAttention()(*tensors, call._replace(bias=call.bias._replace(tensor=one)))
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (*tensors, one))))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
