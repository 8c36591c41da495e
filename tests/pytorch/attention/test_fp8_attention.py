"""FP8 attention of the unfused backend against its definition, and its scaling state."""

import copy
from dataclasses import dataclass
from itertools import accumulate

import attention_reference
import fp8_attention_reference as definition
import pytest
import torch
from cases import names
from fp8_attention_reference import GRAD_OUT, GRAD_PRODUCT, GRAD_QKV, OUT, QKV, SOFTMAX
from fp8_reference import E4M3, E5M2, decode, encode
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine._env import AttentionVariables
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.attention.backends import choice, unfused
from transformer_engine.pytorch.attention.backends.backend import Problem
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD

# On a GPU the backend warns, once in a process, that it is not the fast one.
pytestmark = pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")

RECIPE = DelayedScaling(amax_history_len=3, fp8_dpa=True)
HEADS, SIZE, LENGTH = 4, 16, 24


@pytest.fixture(autouse=True)
def _without_cudnn(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")


@dataclass(frozen=True)
class Case:
    mask_type: str = "causal"
    qkv_format: str = "bshd"
    groups: int = HEADS
    keys: int = LENGTH
    size: int = SIZE
    window: tuple[int, int] | None = None
    lengths: tuple[tuple[int, int], ...] = ((LENGTH, LENGTH), (LENGTH, LENGTH))
    bias: bool = False
    format: Format = Format.HYBRID
    packed: bool = False

    def __str__(self):
        return names.of_case(self)


CASES = [
    Case(),
    Case("no_mask", "sbhd", groups=2, keys=37),
    Case("causal", "sbhd", size=20, format=Format.E4M3),
    Case("causal", groups=1, packed=True),
    Case("causal_bottom_right", keys=40, window=(9, 0)),
    Case("no_mask", window=(5, 3), bias=True),
    Case("arbitrary"),
    Case("padding", lengths=((LENGTH, 11), (7, LENGTH), (0, 5))),
    Case("padding_causal", "thd", groups=2, lengths=((13, 13), (LENGTH, LENGTH), (1, 1))),
]


def train_a_little(core, x, steps=3, recipe=RECIPE, **arguments):
    """Runs steps, so that every scale is computed from an amax."""
    for _ in range(steps):
        with te.fp8_autocast(fp8_recipe=recipe):
            out = core(*x, **arguments)
        out.backward(torch.randn_like(out))


def inputs_of(case, device):
    """Returns query, key and value, the arguments of the call, and which keys each query sees."""
    batch = len(case.lengths)
    sizes = [(LENGTH, HEADS), (case.keys, case.groups), (case.keys, case.groups)]
    x = [torch.randn(batch, n, heads, case.size, device=device) for n, heads in sizes]
    if case.packed:
        heads = [heads for _, heads in sizes]
        x = list(torch.randn(batch, LENGTH, sum(heads), case.size, device=device).split(heads, 2))
    arguments, arbitrary = {}, None
    if case.mask_type == "arbitrary":
        arbitrary = torch.rand(batch, 1, LENGTH, case.keys) < 0.3
        arguments["attention_mask"] = arbitrary.to(device)
    if "padding" in case.mask_type:
        for name, side in (("cu_seqlens_q", 0), ("cu_seqlens_kv", 1)):
            ends = [0, *accumulate(pair[side] for pair in case.lengths)]
            arguments[name] = torch.tensor(ends, dtype=torch.int32, device=device)
    if case.bias:
        arguments["core_attention_bias_type"] = "post_scale_bias"
        arguments["core_attention_bias"] = torch.randn(1, HEADS, LENGTH, case.keys, device=device)
    seen = attention_reference.seen_keys(
        case.mask_type, case.window, LENGTH, case.keys, case.lengths, arbitrary
    )
    return x, arguments, seen


def in_format(x, case, side):
    """Converts `[batch, sequence, ...]` to the format of the case."""
    if case.qkv_format == "sbhd":
        return x.transpose(0, 1)
    if case.qkv_format == "thd":
        return torch.cat([x[i, : pair[side]] for i, pair in enumerate(case.lengths)])
    return x


def assert_nearest(actual, scale, format, expected):
    """Checks that `actual` is `expected` rounded to FP8, up to the error of sums in fp32.

    Sums of products of codes often lie half way between two codes: with some inputs 2 % of them
    do. An element of the softmax gradient that is rounded to the other code changes a row of the
    result.
    """
    scale, off = scale.cpu(), 1e-5 * expected.abs() + 1e-6 * expected.abs().max()
    x = (actual.detach().cpu(), expected - off, expected + off)
    got, low, high = (decode(encode(t, format, scale), format) for t in x)
    distance = got - got.clamp(low, high)
    assert distance.count_nonzero() < 2e-3 * got.numel()
    assert distance.norm() < 5e-3 * got.norm()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_its_definition(case, device):
    recipe = DelayedScaling(amax_history_len=3, fp8_dpa=True, fp8_format=case.format)
    core = te.DotProductAttention(
        HEADS,
        case.size,
        case.groups,
        qkv_format=case.qkv_format,
        attn_mask_type=case.mask_type,
        window_size=case.window,
    )
    x, arguments, seen = inputs_of(case, device)
    leaves = [in_format(t, case, min(i, 1)).detach().requires_grad_() for i, t in enumerate(x)]
    train_a_little(core, leaves, recipe=recipe, **arguments)
    forward, backward = [core.scaling[d].scale.clone() for d in (FORWARD, BACKWARD)]
    grad = torch.randn(*x[0].shape, device=device)
    for t in leaves:
        t.grad = None
    with te.fp8_autocast(fp8_recipe=recipe):
        out = core(*leaves, **arguments)
        row = core.scaling[FORWARD].amax_history[0].tolist()
    out.backward(in_format(grad, case, 0).flatten(-2))

    if case.qkv_format == "thd":  # padding has no gradient
        for i, (real, _) in enumerate(case.lengths):
            grad[i, real:] = 0.0
            for t in x:
                t[i, real:] = 0.0
    of_grads = E5M2 if case.format is Format.HYBRID else E4M3
    bias = arguments.get("core_attention_bias", torch.zeros(())).double().cpu()
    expected = definition.attention(x, grad, seen, (forward, backward), bias, of_grads)
    flat = in_format(expected.out, case, 0).flatten(-2)
    assert_nearest(out, forward[OUT], E4M3, flat)
    for i, (t, codes) in enumerate(zip(leaves, expected.gradients, strict=True)):
        wanted = in_format(codes, case, min(i, 1))
        assert_nearest(t.grad, backward[GRAD_QKV], of_grads, wanted)
    for column, amax in expected.forward.items():
        assert row[column] == pytest.approx(amax, rel=1e-3)
    newest = core.scaling[BACKWARD].amax_history[-1]
    for column, amax in expected.backward.items():
        assert newest[column].item() == pytest.approx(amax, rel=0.02)
    unused = set(range(9)) - set(expected.forward)
    assert all(row[i] == 0.0 for i in unused)


def test_backward_in_high_precision(device, monkeypatch):
    """Its GEMMs take the values that the forward multiplied; casts have the gradient 1."""
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    case, core = Case(), attention(qkv_format="bshd")
    x, _, seen = inputs_of(case, device)
    leaves = [t.clone().requires_grad_() for t in x]
    train_a_little(core, leaves)
    forward = core.scaling[FORWARD].scale.clone()
    for t in leaves:
        t.grad = None
    with te.fp8_autocast(fp8_recipe=RECIPE):
        out = core(*leaves)
    grad = torch.randn(x[0].shape, device=device)
    out.backward(grad.flatten(-2))
    expected = definition.attention(x, grad, seen, (forward, forward), of_grads=None)
    assert_nearest(out, forward[OUT], E4M3, expected.out.flatten(-2))
    for t, wanted in zip(leaves, expected.gradients, strict=True):
        assert (t.grad.cpu() - wanted).norm() < 1e-5 * wanted.norm()
    assert not core.scaling[BACKWARD].amax_history.any()


def attention(**more):
    return te.DotProductAttention(HEADS, SIZE, **more)


def tensors(device="cpu", dtype=torch.float32):
    shape = (LENGTH, 2, HEADS, SIZE)
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def state_of(core):
    return [t for s in core.scaling.values() for t in (s.scale, s.amax_history)]


def test_scales_follow_the_history(device):
    """The end of the autocast updates scales of the forward, the backward those of gradients."""
    core, x = attention(), tensors(device)
    with te.fp8_autocast(fp8_recipe=RECIPE):
        out = core(*x)
        before = core.scaling[FORWARD].amax_history[0].clone()
        assert torch.equal(core.scaling[FORWARD].scale.cpu(), torch.ones(9))
    for column in (QKV, OUT, SOFTMAX):
        scale, amax = core.scaling[FORWARD].scale[column].item(), before[column].item()
        assert scale == pytest.approx(448 / amax)
    assert torch.equal(core.scaling[BACKWARD].scale.cpu(), torch.ones(6))
    out.sum().backward()
    backward = core.scaling[BACKWARD]
    for column in (GRAD_OUT, GRAD_PRODUCT, GRAD_QKV):
        scale, amax = backward.scale[column].item(), backward.amax_history[-1, column].item()
        assert scale == pytest.approx(57344 / amax)
    assert torch.equal(backward.amax_history[0].cpu(), torch.zeros(6))


def test_evaluation_leaves_no_trace(device):
    core, x = attention(), tensors(device)
    train_a_little(core, x)
    before = [t.clone() for t in state_of(core)]
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=RECIPE):
        evaluated = core(*x)
    for got, wanted in zip(state_of(core), before, strict=True):
        assert_bitwise(got, wanted)
    with te.fp8_autocast(fp8_recipe=RECIPE):
        assert_bitwise(evaluated, core(*x))  # the scales have not changed


def test_micro_batches_keep_the_largest_amax():
    core, x = attention(), tensors()
    with te.fp8_autocast(fp8_recipe=RECIPE):
        for factor in (1.0, 3.0, 2.0):
            core(*(t * factor for t in x))
        assert core.scaling[FORWARD].amax_history[0, QKV] == 3 * max(t.abs().max() for t in x)


def test_state_survives_a_checkpoint():
    core, x = attention(), tensors()
    train_a_little(core, x)
    saved = core.state_dict()
    assert saved["_extra_state"].dtype is torch.uint8 and saved["_extra_state"].numel() > 0
    other = attention()
    # The key in checkpoints of NVIDIA's version 1.6.
    other.load_state_dict({"fused_attention._extra_state": saved["_extra_state"]})
    clone = copy.deepcopy(core)
    results = []
    for module in (core, other, clone):
        torch.manual_seed(3)
        for t in x:
            t.grad = None
        train_a_little(module, x, steps=2)
        results.append([*(t.grad.clone() for t in x), *(t.clone() for t in state_of(module))])
    for again in results[1:]:
        for got, wanted in zip(again, results[0], strict=True):
            assert_bitwise(got, wanted)


def test_no_state_without_fp8():
    core, x = attention(), tensors()
    with te.fp8_autocast(fp8_recipe=DelayedScaling()):
        core(*x)
    assert core.state_dict()["_extra_state"].numel() == 0
    core.load_state_dict({"_extra_state": torch.empty(0, dtype=torch.uint8)})
    core.load_state_dict({})


def test_history_length_may_change():
    core, x = attention(), tensors()
    train_a_little(core, x)
    train_a_little(core, x, 1, DelayedScaling(amax_history_len=7, fp8_dpa=True))
    assert core.scaling[FORWARD].amax_history.shape == (7, 9)


def test_calibration_makes_scales_ready(device):
    core, x = attention(), tensors(device)
    plain = core(*x)
    with torch.no_grad(), te.fp8_autocast(False, calibrating=True, fp8_recipe=RECIPE):
        calibrated = core(*x)
    assert torch.allclose(calibrated, plain, atol=1e-5)
    scales = core.scaling[FORWARD].scale
    assert scales[QKV].item() == pytest.approx(448 / max(t.abs().max().item() for t in x))
    assert scales[OUT].item() == pytest.approx(448 / plain.abs().max().item(), rel=1e-4)
    # The first query sees one key, whose weight is 1.
    assert scales[SOFTMAX].item() == pytest.approx(448.0, rel=1e-4)
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=RECIPE):
        error = core(*x) - plain
    assert error.norm() < 0.06 * plain.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_inputs(dtype, device):
    core, x = attention(), tensors(device, dtype)
    train_a_little(core, x)
    with te.fp8_autocast(fp8_recipe=RECIPE):
        out = core(*x)
    assert out.dtype is dtype and x[0].grad.dtype is dtype
    plain = core(*x).float()
    assert (out.float() - plain).norm() < 0.1 * plain.norm()


def test_torch_autocast_rounds_inputs_alone(device):
    core, x = attention(), tensors(device)
    with torch.autocast(device, torch.bfloat16), te.fp8_autocast(fp8_recipe=RECIPE):
        out = core(*x)
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4, fp8_dpa=True)):
        wanted = attention()(*(t.bfloat16() for t in x))
    assert_bitwise(out, wanted)


def test_mha_is_announced_once():
    recipe = DelayedScaling(fp8_mha=True)
    x = tensors()
    with te.fp8_autocast(fp8_recipe=RECIPE):
        plain = attention()(*x)
    with te.fp8_autocast(fp8_recipe=recipe):
        with pytest.warns(UserWarning, match="fp8_mha: tensors between projections"):
            out = attention()(*x)
        attention()(*x)  # does not warn: a warning is an error
    assert_bitwise(out, plain)


def test_current_scaling_is_refused():
    scope = te.fp8_autocast(fp8_recipe=Float8CurrentScaling(fp8_dpa=True))
    message = r"expected a recipe .* \(layer core\)"
    with scope, pytest.raises(NotImplementedError, match=message):
        attention(name="core")(*tensors())
    layer = te.TransformerLayer(32, 64, 2, device="cpu", name="layer")
    named = r"expected a recipe .* \(layer layer\.self_attention\.core_attention\)$"
    with scope, pytest.raises(NotImplementedError, match=named):
        layer(torch.randn(16, 2, 32))


def test_table_and_errors(monkeypatch):
    table = te.attention_backends(fp8=True, device="cpu")
    assert table.chosen == "unfused"
    assert "does not compute in FP8" in table["sdpa"]
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    scope = te.fp8_autocast(fp8_recipe=RECIPE)
    with scope, pytest.raises(ValueError, match="sbhd tensors in FP8 on cpu"):
        attention()(*tensors())


def test_emulation_on_a_gpu_is_announced(monkeypatch):
    said = []
    monkeypatch.setattr(choice, "warn_once", said.append)
    for device in ("cuda", "cpu"):
        problem = Problem(device=device, fp8=True)
        choice._announce(problem, unfused.BACKEND, AttentionVariables())
    assert len(said) == 1 and "FP8 attention runs on the backend 'unfused'" in said[0]
