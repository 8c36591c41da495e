"""The FP8 adapter to cuDNN on the CPU, with stand-ins for cuDNN, against the unfused backend."""

import copy

import pytest
import torch
from cases import fake_cudnn_fp8
from cases.fp8_steps import CASES, RUNS, Case, assert_near, core_of, steps_of
from torch._subclasses import FakeTensorMode

from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import cudnn_fp8, unfused
from transformer_engine.pytorch.attention.backends.backend import Problem, refusal
from transformer_engine.pytorch.attention.backends.choice import ranked
from transformer_engine.pytorch.attention.backends.policy import preference
from transformer_engine.pytorch.attention.core.environment import environment
from transformer_engine.pytorch.attention.masks.masks import mask_rule
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD
from transformer_engine.pytorch.kernels import attention as kernels
from transformer_engine.pytorch.kernels.packed import packed_layout_of

HOPPER = {"device": "cuda", "capability": (9, 0), "fp8": True, "key_size": 128, "value_size": 128}


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    reset_autocast()
    for name in ("fp8_attention_forward", "fp8_attention_backward", "attention_backward"):
        monkeypatch.setattr(cudnn_fp8, name, getattr(fake_cudnn_fp8, name))
    monkeypatch.setattr(cudnn_fp8, "_refusal", lambda problem, in_fp8: "")


@pytest.mark.parametrize(("case", "backward"), RUNS)
def test_against_definition(case, backward, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    module = core_of(case)
    twin = copy.deepcopy(module)
    results = []
    for one, backend in ((module, cudnn_fp8.BACKEND), (twin, unfused.BACKEND)):
        monkeypatch.setattr(core, "choose", lambda *call, chosen=backend: chosen)
        results.append(steps_of(one, case, "cpu"))
    assert_near(*results)


@pytest.mark.parametrize(
    ("case", "in_fp8"),
    [
        (Case("no_mask"), True),
        (Case("causal"), False),
        (Case("no_mask", size=64), False),
        (Case("no_mask", queries=120), False),
        (Case("no_mask", keys=136), False),
    ],
    ids=str,
)
def test_the_faster_backward(case, in_fp8, monkeypatch):
    """The backward records amaxes only if it casts gradients to FP8."""
    monkeypatch.setattr(core, "choose", lambda *call: cudnn_fp8.BACKEND)
    module = core_of(case)
    steps_of(module, case, "cpu", 1)
    assert bool(module.scaling[BACKWARD].amax_history.any()) == in_fp8


@pytest.mark.parametrize("case", [case for case in CASES if case.packed], ids=str)
@pytest.mark.parametrize("backward", ["0", "1"])
def test_parts_of_one_tensor_are_cast_together(case, backward, monkeypatch):
    """Their codes are parts of one tensor, and so are the tensors that the backward reads."""
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    monkeypatch.setattr(core, "choose", lambda *call: cudnn_fp8.BACKEND)
    forward, backwards = (
        cudnn_fp8.fp8_attention_forward,
        ("fp8_attention_backward" if backward == "1" else "attention_backward"),
    )
    inner, read, read_again = getattr(cudnn_fp8, backwards), [], []

    def watched_forward(*arguments):
        read.append(arguments[:3])
        return forward(*arguments)

    def watched_backward(*arguments):
        assert arguments[-1] == kernels.AS_INPUTS
        read_again.append(arguments[1:4])
        return inner(*arguments)

    monkeypatch.setattr(cudnn_fp8, "fp8_attention_forward", watched_forward)
    monkeypatch.setattr(cudnn_fp8, backwards, watched_backward)
    steps_of(core_of(case), case, "cpu", 1)
    assert read and read_again  # also with stand-ins, for a recording
    assert all(packed_layout_of(*parts) is not None for parts in read + read_again)


def test_a_backward_in_16_bit_is_announced(monkeypatch):
    def said(**changes):
        return cudnn_fp8.BACKEND.notice(Problem(**{**HOPPER, **changes}), environment())

    assert "backward in 16 bit" in said()
    assert said(training=False) == said(rule=mask_rule("no_mask"), queries=128, keys=128) == ""
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    assert said() == ""


def test_preferred(monkeypatch):
    def chosen(**changes):
        problem, allowed = Problem(**{**HOPPER, **changes}), environment()
        return next(b.name for b in ranked(problem, allowed) if not refusal(b, problem, allowed))

    assert chosen() == chosen(rule=mask_rule("no_mask"), training=False) == "cudnn_fp8"
    assert chosen(rule=mask_rule("padding")) == "unfused"
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "2")
    assert preference(Problem(), environment())[0] == "cudnn_fp8"
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert chosen() == "unfused"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"fp8": False}, "computes in FP8 alone"),
        ({"key_size": 64, "value_size": 64}, None),
        ({"key_size": 64, "value_size": 64, "rule": mask_rule("no_mask")}, None),
        ({"key_size": 24, "training": False}, "divisible by 16"),
        ({"rule": mask_rule("padding_causal")}, "takes whole sequences"),
        ({"dropout": 0.1}, "has no dropout"),
        ({"bias_type": "alibi"}, "takes no bias"),
        ({"softmax_type": "learnable"}, "has no sink"),
        ({"cache": "appended"}, "each length"),
        ({"part": True}, None),
        ({"calibrating": True}, "calibrate on 'unfused'"),
        ({"capability": (8, 9)}, "compute capability 9.0"),
        ({"compiling": True}, None),
        ({"compiling": True, "queries": 1}, "several queries"),
    ],
)
def test_requirements(changes, reason):
    refused = refusal(cudnn_fp8.BACKEND, Problem(**{**HOPPER, **changes}), environment())
    assert refused is None if reason is None else reason in refused


def test_the_backward_in_fp8_takes_one_size(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "1")
    part = Problem(**HOPPER, part=True)
    assert "no backward in FP8 for parts" in refusal(cudnn_fp8.BACKEND, part, environment())
    problem = Problem(**HOPPER | {"key_size": 64, "value_size": 64})
    assert "heads of 128" in refusal(cudnn_fp8.BACKEND, problem, environment())
    inference = problem._replace(training=False)
    assert refusal(cudnn_fp8.BACKEND, inference, environment()) is None
    problem = Problem(**HOPPER, queries=256, keys=257)
    assert "lengths divisible by 128" in refusal(cudnn_fp8.BACKEND, problem, environment())


@pytest.mark.parametrize("format", [kernels.SBHD, kernels.BSHD])
def test_shapes_without_a_kernel(format):
    settings = kernels.settings_of(format)
    with FakeTensorMode():
        query, key, value = (
            torch.empty(5, 2, heads, size, dtype=torch.uint8)
            for heads, size in ((4, 16), (2, 16), (2, 32))
        )
        scales = [torch.empty(1) for _ in range(3)]
        refused = (query, key, value, scales, settings, 0.25)
        out, statistics, pairs = torch.ops.te.fp8_attention_forward(*refused, True, [None, None])
        *grads, pair = torch.ops.te.fp8_attention_backward(
            torch.empty_like(out),
            *(query, key, value, out, statistics, pairs, scales, settings, 0.25, 6),
            [None] * 4,
            kernels.APART,
        )
    assert out.shape == (5, 2, 128) and out.dtype is torch.uint8
    assert pair.shape == (2,)
    counts = {kernels.SBHD: (2, 4, 5), kernels.BSHD: (5, 4, 2)}
    assert statistics.shape == counts[format]
    assert [g.shape for g in grads] == [x.shape for x in (query, key, value)]
