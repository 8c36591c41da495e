"""The adapter to cuDNN on the CPU, with stand-ins for cuDNN's kernels."""

import pytest
import torch
from cases import fake_cudnn
from cases.attention_factors import FACTORS, HAND_PICKED
from cases.attention_matrix import check, pairwise
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import choice, cudnn, strides
from transformer_engine.pytorch.attention.backends.backend import Problem, refusal
from transformer_engine.pytorch.attention.backends.policy import preference
from transformer_engine.pytorch.attention.masks.masks import MASK_TYPES, mask_rule
from transformer_engine.pytorch.kernels import attention as kernels

TAKEN = {
    **FACTORS,
    "mask_type": [name for name in MASK_TYPES if name != "arbitrary"],
    "dtype": [torch.float16, torch.bfloat16],
    "bias": ["no_bias", "post_scale_bias", "alibi"],
    "sizes": [(16, 16), (24, 16), (16, 40)],
    "by_lengths": [True],
}
DENSE = {**TAKEN, "by_lengths": [False], "qkv_format": ["sbhd", "bshd"]}
CASES = [
    *HAND_PICKED,
    *pairwise(TAKEN),
    *pairwise(DENSE),
    *pairwise({**TAKEN, "bias": ["no_bias"]}),
]
HOPPER = {"device": "cuda", "capability": (9, 0)}


@pytest.fixture
def stand_in(monkeypatch):
    """Chooses the cuDNN backend as on a machine with a Hopper GPU; tensors stay on the CPU."""
    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(cudnn, name, getattr(fake_cudnn, name))
    monkeypatch.setattr(cudnn, "_refusal", lambda problem: "")

    def choose(*facts):
        problem = choice.problem_of(*facts)._replace(**HOPPER)
        reason = refusal(cudnn.BACKEND, problem, choice.environment())
        if reason is not None:
            pytest.skip(reason)
        return fake_cudnn.BACKEND

    monkeypatch.setattr(core, "choose", choose)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_definition(stand_in, case):
    check(case, "cpu")


def test_tensors_are_taken_as_they_lie():
    packed, interleaved = torch.empty(5, 2, 12, 16), torch.empty(5, 2, 4, 3, 16)
    one = torch.empty(1, 7, 1, 24)[:, :, :, :16]
    of_thd = torch.empty(10, 12, 16)
    for inputs, placed in (
        (packed.split(4, 2), False),
        (packed.split(4, 2), True),
        (packed.split(4, 2)[::2], False),
        (interleaved.unbind(3), True),
        ((one,), False),
        (of_thd.split(4, 1), True),
    ):
        read = strides.readable_by_cudnn(*inputs, placed=placed)
        assert all(a is b for a, b in zip(read, inputs, strict=True))


@pytest.mark.parametrize(
    ("x", "placed"),
    [
        (torch.randn(5, 2, 4, 17)[..., 1:], False),
        (torch.randn(5, 2, 16, 4).transpose(2, 3), False),
        (torch.randn(5, 2, 1, 16).expand(5, 2, 4, 16), False),
        # A part of a packed projection, without the other parts.
        (torch.randn(10, 12, 16)[:, :4], True),
        (torch.randn(5, 2, 12, 16)[:, :, :4], True),
    ],
)
def test_strides_that_cudnn_cannot_read_are_copied(x, placed):
    (copy,) = strides.readable_by_cudnn(x, placed=placed)
    assert copy is not x and copy.is_contiguous() and torch.equal(copy, x)


def test_memory_that_does_not_begin_at_16_bytes_is_copied():
    memory = torch.randn(5 * 2 * 4 * 16 + 4)
    whole, shifted = (memory[i:][:640].view(5, 2, 4, 16) for i in (4, 1))
    assert kernels._aligned(whole) is whole
    copy = kernels._aligned(shifted)
    assert copy.data_ptr() % 16 == 0 and torch.equal(copy, shifted)


@torch.no_grad()
def test_every_step_of_a_fixed_cache_is_one_problem(stand_in, monkeypatch):
    """Each step reads the whole cache in place, and its settings contain no length."""
    read = []

    def forward(query, key, value, settings, *others):
        read.append((query.shape, key.data_ptr(), key.shape, key.stride(), settings))
        return fake_cudnn.attention_forward(query, key, value, settings, *others)

    monkeypatch.setattr(cudnn, "attention_forward", forward)
    layer = te.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", layer_number=1)
    query = torch.randn(2, 7, 4, 16, dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 7, 2, 16, dtype=torch.bfloat16)
    whole = layer(query, key, value)
    params = te.InferenceParams(3, 32)
    params.sequence_len_offset = torch.tensor(0)
    read.clear()
    for i in range(7):
        out = layer(*(x[:, i : i + 1] for x in (query, key, value)), inference_params=params)
        params.sequence_len_offset += 1
        torch.testing.assert_close(out[:, 0], whole[:, i], rtol=2e-2, atol=2e-2)
    keys = params.key_value_memory_dict[1][0]
    assert len(read) == 7
    assert len(set(read)) == 1
    assert read[0][1:4] == (keys.data_ptr(), (2, 32, 2, 16), (32, 96, 16, 1))


@pytest.mark.parametrize("shift", [0, 1])
def test_gradients_of_thd_lie_as_what_is_read(monkeypatch, shift):
    """Gradients have the strides of the inputs, or of their copies if inputs are not aligned."""
    seen = []
    monkeypatch.setattr(kernels._C, "attention_backward", lambda *call_args: seen.append(call_args))
    memory = torch.empty(7 * 3 * 2 * 8 + 1, dtype=torch.bfloat16)
    parts = memory[shift : shift + 7 * 3 * 2 * 8].view(7, 3, 2, 8).unbind(1)
    out, statistics = torch.empty(7, 16), torch.empty(7, 2)
    settings = kernels.settings_of(kernels.THD, longest=(7, 7))
    call_args = (out, *parts, out, statistics, settings, 1.0, 0.0, (None,) * 4, None, None, None)
    results = kernels.attention_backward(*call_args, False, False, True)[:3]
    inputs, written = seen[0][0], seen[0][7][1:4]
    for read, gradient, result in zip(inputs, written, results, strict=True):
        assert read.stride() == gradient.stride() == result.stride()
        assert read.is_contiguous() == bool(shift)


@pytest.mark.parametrize("format", [kernels.SBHD, kernels.BSHD, kernels.THD])
def test_shapes_without_a_kernel(format):
    sequences = (None,) * 4
    with FakeTensorMode():
        lead = (10,) if format == kernels.THD else (5, 2)
        query = torch.empty(*lead, 4, 16, dtype=torch.bfloat16)
        value = torch.empty(*lead, 2, 24, dtype=torch.bfloat16)
        key = torch.empty(*lead, 2, 16, dtype=torch.bfloat16)
        bias = torch.empty(1, 4, 5, 5)
        settings = kernels.settings_of(format)
        options = (settings, 0.25, 0.0, sequences, bias, None, None)
        out, statistics = torch.ops.te.attention_forward(query, key, value, *options, True)
        grads = torch.ops.te.attention_backward(
            torch.empty_like(out), query, key, value, out, statistics, *options, True, False, 0
        )
    assert out.shape == (*lead, 4 * 24)
    counts = {kernels.SBHD: (2, 4, 5), kernels.BSHD: (5, 4, 2), kernels.THD: (10, 4)}
    assert statistics.shape == counts[format] and statistics.dtype is torch.float32
    assert [g.shape for g in grads[:4]] == [x.shape for x in (query, key, value, bias)]
    assert grads[4] is None


@pytest.mark.parametrize("by_head", [False, True])
def test_one_gradient_and_what_is_written_into_it(monkeypatch, by_head):
    """A compiled operator cannot return parts of one tensor, so it returns the whole tensor."""
    seen = []
    monkeypatch.setattr(kernels._C, "attention_backward", lambda *call_args: seen.append(call_args))
    heads = torch.empty(5, 2, 4, 3, 16) if by_head else torch.empty(5, 2, 3, 4, 16)
    parts = heads.unbind(-2 if by_head else -3)
    out, statistics = torch.empty(5, 2, 64), torch.empty(2, 4, 5)
    call_args = (out, *parts, out, statistics, kernels.settings_of(kernels.SBHD), 1.0, 0.0)
    together = kernels.PACKED_BY_HEAD if by_head else kernels.PACKED
    absent = (None,) * 4, None, None, None, False, False
    whole, *others = kernels.attention_backward(*call_args, *absent, together)
    assert whole.shape == (5, 2, 192) and others == [None] * 4
    written = seen[0][7][1:4]
    for part, wanted in zip(
        written, whole.view(heads.shape).unbind(-2 if by_head else -3), strict=True
    ):
        assert (part.data_ptr(), part.stride()) == (wanted.data_ptr(), wanted.stride())
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in call_args[:6]]
        results = torch.ops.te.attention_backward(*fakes, *call_args[6:], *absent, together)
    assert results[0].shape == whole.shape


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("groups", "interleaved"), [(4, True), (4, False), (2, False)])
def test_compiled_gradients_of_a_projection_are_not_copied(
    monkeypatch, groups, interleaved, dynamic
):
    """As in eager mode. No node of the forward graph or of the backward graph copies."""
    fake_cudnn.serve(monkeypatch)
    layer = te.MultiheadAttention(
        64,
        4,
        num_gqa_groups=groups,
        qkv_format="bshd",
        fuse_qkv_params=True,
        qkv_weight_interleaved=interleaved,
        attention_dropout=0.0,
        device="cpu",
        params_dtype=torch.bfloat16,
    )
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(
        layer, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=keep)
    )
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)
    results = []
    for run in (layer, compiled):
        y = run(x)
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream)])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert "te.attention_backward.default" in names
    assert names.isdisjoint({"aten.stack.default", "aten.cat.default", "aten.clone.default"})


def test_asked_for_by_its_number(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "1")
    assert preference(Problem(**HOPPER), choice.environment())[0] == "cudnn"


def test_padding_as_a_mask_says_what_to_give():
    problem = Problem(**HOPPER, rule=mask_rule("padding"), padded_by_mask=True)
    reason = refusal(cudnn.BACKEND, problem, choice.environment())
    assert "cu_seqlens_q" in reason
