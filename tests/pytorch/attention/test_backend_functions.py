"""A backend is a pair of functions: the backward reads only what the forward saves."""

import attention_reference as reference
import pytest
import torch
from cases import fake_cudnn, fake_flash_attn, fake_flash_backward
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv
from cases.attention_matrix import (
    BOUND,
    GAP,
    HEADS,
    Case,
    module_of,
    norm_error,
    prepare,
    to_format,
)
from torch.nn.functional import pad
from torch.torch_version import TorchVersion

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention import stage
from transformer_engine.pytorch.attention.backends import (
    BACKENDS,
    cudnn,
    flash2,
    flash3,
    flash4,
    local_graph,
    sdpa,
    sdpa_kernels,
)
from transformer_engine.pytorch.attention.backends.backend import NO_BACKWARD, Needs
from transformer_engine.pytorch.fp8.autocast_stack import Step

ALL = Needs(True, True, True)
FLASH = {
    "flash2": (flash2, fake_flash_backward.module("flash2")),
    "flash3": (flash3, fake_flash_backward.module("flash3")),
    "flash4": (flash4, fake_flash_attn.module("flash4")),
    "flash2 by torch": (flash2, fake_flash_attn.module("flash2")),
}
TENSORS = {"dtype": torch.bfloat16, "size": 64, "value_size": 64}
# Backend, case, whether the backend saves a log-sum-exp.
CASES = [
    ("sdpa", Case("causal"), True),
    ("sdpa", Case("no_mask", queries=5, keys=9, qkv_format="bshd", groups=2), True),
    ("sdpa", Case("padding", by_lengths=True, groups=2), True),
    ("sdpa", Case("padding_causal", qkv_format="thd", dtype=torch.bfloat16), True),
    ("sdpa", Case("arbitrary", queries=5, keys=9), True),
    ("sdpa", Case("causal", value_size=24, groups=2), False),
    ("sdpa", Case("causal_bottom_right", queries=9, keys=5, value_size=8), False),
    ("unfused", Case("causal", groups=2), False),
    ("unfused", Case("padding", queries=5, keys=9, qkv_format="thd", room=True), False),
    ("unfused", Case("no_mask", bias="pre_scale_bias", bias_shape=(1, 1)), False),
    ("unfused", Case("arbitrary", bias="post_scale_bias", dtype=torch.float16), False),
    ("flash2", Case("causal", **TENSORS), True),
    ("flash2", Case("padding_causal", by_lengths=True, qkv_format="bshd", **TENSORS), True),
    ("flash2", Case("padding", qkv_format="thd", room=True, **TENSORS), True),
    ("flash3", Case("no_mask", queries=5, keys=9, groups=1, **TENSORS), True),
    ("flash4", Case("causal", qkv_format="bshd", **TENSORS), True),
    ("flash4", Case("padding", qkv_format="thd", **TENSORS), False),
    ("cudnn", Case("causal", **TENSORS, groups=2), True),
    ("cudnn", Case("padding", queries=5, keys=9, by_lengths=True, **TENSORS), True),
    ("cudnn", Case("padding_causal", qkv_format="thd", room=True, **TENSORS), True),
    ("flash2 by torch", Case("causal", **TENSORS), False),
    ("flash2 by torch", Case("padding", **TENSORS), False),
]


def backend_of(name, monkeypatch):
    if name in FLASH:
        module, package = FLASH[name]
        monkeypatch.setattr(module.KERNELS, "_module", package)
        return module.BACKEND
    if name == "cudnn":
        for function in ("attention_forward", "attention_backward"):
            monkeypatch.setattr(cudnn, function, getattr(fake_cudnn, function))
        return fake_cudnn.BACKEND
    return next(backend for backend in BACKENDS if backend.name == name)


class Taken(Exception):
    """Ends a forward when `call_of` has got its arguments."""


def call_of(case, monkeypatch):
    """Returns the problem, and the arguments of `CoreAttention`: query, key, value and call."""
    problem, taken = prepare(case, "cpu"), []

    def attend(core, *arguments):
        taken.extend(arguments)
        raise Taken

    sides = (case.lengths[0], case.lengths[1], case.lengths[1])
    inputs = [to_format(x, case, n) for x, n in zip(problem.inputs, sides, strict=True)]
    with monkeypatch.context() as patch, pytest.raises(Taken):
        patch.setattr(core.CoreAttention, "__call__", attend)
        module_of(case)(*inputs, **problem.arguments)
    return problem, taken


def by_definition(case, problem):
    """Returns the result by definition, its leaves, and the log-sum-exps of the scores."""
    exact = [x.double().requires_grad_() for x in problem.inputs]
    out = reference.attention(*exact, problem.seen, **problem.biases)
    query, key = (x.detach().transpose(1, 2) for x in exact[:2])
    key = key.repeat_interleave(HEADS // case.groups, 1)
    scores = (query @ key.mT * case.size**-0.5).masked_fill(~problem.seen, -torch.inf)
    return out, [*exact, *problem.biases.values()], torch.logsumexp(scores, -1)


@pytest.mark.parametrize(("name", "case", "has_statistics"), CASES, ids=str)
def test_a_backend_is_a_pair(name, case, has_statistics, monkeypatch):
    backend = backend_of(name, monkeypatch)
    problem, (*inputs, call) = call_of(case, monkeypatch)
    needs = ALL._replace(bias=call.bias.tensor is not None)
    expected, leaves, statistics = by_definition(case, problem)
    with torch.no_grad():
        alone, nothing = backend.forward(*inputs, call, NO_BACKWARD)
        out, saved = backend.forward(*inputs, call, needs)
    assert nothing is None and torch.equal(alone, out) and out.grad_fn is None
    assert all(x is None or isinstance(x, torch.Tensor) for x in saved.tensors)
    assert (saved.log_sum_exp is not None) == has_statistics
    if has_statistics:
        assert saved.log_sum_exp.dtype is torch.float32
        assert_statistics(saved.log_sum_exp, statistics, case)

    upstream = torch.randn(expected.shape).to(case.dtype)
    wanted = torch.autograd.grad(expected, leaves, upstream.double())
    upstream = to_format(upstream.flatten(2), case, case.lengths[0])
    with torch.no_grad():
        found = backend.backward(upstream, saved, call.settings(), needs)
        again = backend.backward(upstream, saved, call.settings(), needs)
    sides = (case.lengths[0], case.lengths[1], case.lengths[1])
    parts = zip(wanted, sides, strict=False)
    wanted = [*(in_format(x, case, side) for x, side in parts), *wanted[3:]]
    tensors = (*inputs, call.bias.tensor)
    for i, exact in enumerate(wanted):
        assert torch.equal(found[i], again[i])
        assert found[i].shape == tensors[i].shape and found[i].dtype is case.dtype
        assert norm_error(found[i], exact) < 2 * BOUND[case.dtype]


def in_format(x, case, lengths):
    """Converts a gradient to the format; zero between sequences, where `to_format` puts 7."""
    between = to_format(torch.zeros(*x.shape[:2], 1, 1), case, lengths) != 0
    return to_format(x, case, lengths).masked_fill(between, 0)


def assert_statistics(found, expected, case):
    """Compares log-sum-exps in any backend's layout, except those of queries that see no key."""
    if found.dim() == 2:  # `[heads, tokens]`; cuDNN: `[tokens, heads]`, padding included
        gap = GAP if found.shape[1] == HEADS and case.room else 0
        found = found.T if found.shape[1] == HEADS else found
        lengths = [n + gap for n in case.lengths[0]]
        *parts, _ = found.split([*lengths, found.shape[1] - sum(lengths)], 1)
        parts = [x[:, : x.shape[1] - gap] for x in parts]
        found = torch.stack([pad(x, (0, case.queries - x.shape[1])) for x in parts])
    seen = expected.isfinite()
    assert found.shape == expected.shape and bool(seen.any())
    bound = 1e-5 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found[seen].double(), expected[seen], rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, case, has_rows in CASES if has_rows or name == "unfused"],
    ids=str,
)
def test_a_part_is_kept_without_what_comes_again(name, case, monkeypatch):
    backend = backend_of(name, monkeypatch)
    problem, (*inputs, call) = call_of(case, monkeypatch)
    call = call._replace(part=True)
    _, _, statistics = by_definition(case, problem)
    with torch.no_grad():
        out, saved = backend.forward(*inputs, call, ALL)
        lse = backend.parts.log_sum_exp(saved, call)
        stripped = backend.parts.strip(saved, call)
        assert lse.dtype is torch.float32 and lse.shape == (*out.shape[:-1], HEADS)
        if not problem.biases:
            exact = statistics.transpose(1, 2).unsqueeze(-1)
            exact = to_format(exact, case, case.lengths[0]).squeeze(-1)
            seen = exact.isfinite() & (exact != 7.0)  # `to_format` puts 7 between sequences
            bound = 1e-5 if case.dtype is torch.float32 else 2e-2
            torch.testing.assert_close(lse[seen].double(), exact[seen], rtol=bound, atol=bound)
        places = {x.untyped_storage().data_ptr() for x in (*inputs, out)}
        assert all(
            x is None or x.untyped_storage().data_ptr() not in places for x in stripped.tensors
        )
        lse = lse.masked_fill(~lse.isfinite(), torch.inf)
        tensors = (*inputs, out)
        again = backend.parts.restore(stripped, tensors, lse, call)
        more = backend.parts.restore(stripped, tensors, lse + 1.0, call)
        upstream = torch.randn_like(out)
        expected = backend.backward(upstream, saved, call.settings(), ALL)
        found = backend.backward(upstream, again, call.settings(), ALL)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert again.log_sum_exp.shape == saved.log_sum_exp.shape
    finite = saved.log_sum_exp.isfinite() & again.log_sum_exp.isfinite() & (again.log_sum_exp != 0)
    assert bool(finite.any())
    assert torch.equal(more.log_sum_exp[finite], again.log_sum_exp[finite] + 1.0)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize(
    ("backend", "case"),
    [(name, case) for name, case, _ in CASES if case.bias == "no_bias"],
    ids=str,
)
def test_only_what_is_needed_is_returned_and_saved(backend, case, name, monkeypatch):
    backend = backend_of(backend, monkeypatch)
    _, (*inputs, call) = call_of(case, monkeypatch)
    needs = NO_BACKWARD._replace(**{name: True})
    with torch.no_grad():
        out, saved = backend.forward(*inputs, call, needs)
        _, complete = backend.forward(*inputs, call, ALL)
        upstream = torch.randn_like(out)
        found = backend.backward(upstream, saved, call.settings(), needs)
        expected = backend.backward(upstream, complete, call.settings(), ALL)
    assert [x is not None for x in found] == list(needs)
    assert torch.equal(getattr(found, name), getattr(expected, name))
    assert bytes_of(saved) <= bytes_of(complete)


def bytes_of(saved):
    tensors = [x for x in (saved.log_sum_exp, *saved.tensors) if x is not None]
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(memory.values())


@pytest.mark.parametrize("changed", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize(("name", "case", "_"), CASES, ids=str)
def test_inputs_that_changed_before_the_backward(name, case, _, changed, monkeypatch):
    """Autograd raises an error, unless the forward has copied them: gradients are never wrong."""
    backend = backend_of(name, monkeypatch)
    _, (*inputs, call) = call_of(case, monkeypatch)
    monkeypatch.setattr(core, "choose", lambda *call: backend)
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = core.CoreAttention()(*inputs, call)
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    with torch.no_grad():
        inputs[changed].mul_(2)
    if name == "cudnn":
        copied = False
    elif name.startswith("flash"):
        copied = case.padded and (case.qkv_format != "thd" or case.room)
    else:
        repeated = name == "sdpa" and case.padded and case.groups != HEADS and changed > 0
        copied = case.qkv_format == "thd" or repeated
    if not copied:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, inputs, upstream)
        return
    for gradient, wanted in zip(torch.autograd.grad(out, inputs, upstream), expected, strict=True):
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("rounds", [False, True], ids=["", "backward in torch.autocast"])
@pytest.mark.parametrize("case", [case for name, case, _ in CASES if name == "sdpa"], ids=str)
def test_without_the_operators_of_torch_its_function_is_differentiated(case, rounds, monkeypatch):
    """Results and gradients are the same bit for bit, with the same random numbers."""
    monkeypatch.setattr(core, "choose", lambda *call: sdpa.BACKEND)
    graphs, forward = [], local_graph.forward

    def counted(*arguments):
        graphs.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(local_graph, "forward", counted)
    for p in (0.0, 0.3):
        results = []
        _, (*inputs, call) = call_of(case, monkeypatch)
        call = call._replace(dropout=call.dropout._replace(p=p))
        inputs = [x.requires_grad_() for x in inputs]
        upstream = None
        for kernels in (sdpa_kernels._KERNELS, {}):
            graphs.clear()
            monkeypatch.setattr(sdpa_kernels, "_KERNELS", kernels)
            torch.manual_seed(7)
            out = core.CoreAttention()(*inputs, call)
            drawn = torch.rand(2)
            upstream = torch.randn_like(out) if upstream is None else upstream
            with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
                gradients = torch.autograd.grad(out, inputs, upstream)
            results.append((out, *gradients, drawn))
            assert bool(graphs) == (not kernels)
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def test_an_operator_counts_with_the_arguments_that_are_known():
    name, arguments = "native_dropout_backward", "grad_output mask scale"
    assert sdpa_kernels._operator(name, arguments) is torch.ops.aten.native_dropout_backward.default
    assert sdpa_kernels._operator(name, "grad_output mask") is None
    assert sdpa_kernels._operator("no_such_operator", "") is None


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.8", reason="older than what is known")
def test_every_kernel_is_known_to_this_torch():
    """A release with other arguments needs a change in `sdpa_kernels.py`."""
    assert len(sdpa_kernels._KERNELS) == 6


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_fp8_attention_is_a_pair(p, monkeypatch):
    """Its functions return what autograd computes with them, and record the same amaxes."""
    monkeypatch.setattr(Step, "end_backward", lambda step: None)
    calls, forward = [], stage.run_forward

    def watched(*arguments):
        calls.append(arguments[:5])
        return forward(*arguments)

    monkeypatch.setattr(stage, "run_forward", watched)
    module, leaves = make_module(attention_dropout=p), make_qkv()
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=2, fp8_dpa=True)):
        torch.manual_seed(1)
        out = module(*leaves)
        results = [(out, *torch.autograd.grad(out, leaves, torch.ones_like(out)), *amaxes(module))]
        for state in module.scaling.values():
            state.amax_history.zero_()
        backend, *inputs, call = calls[0]
        torch.manual_seed(1)
        with torch.no_grad():
            out, saved = backend.forward(*inputs, call, ALL)
            gradients = backend.backward(torch.ones_like(out), saved, call.settings(), ALL)
        results.append((out, *gradients[:3], *amaxes(module)))
    assert saved.log_sum_exp is None and gradients[3:] == (None, None)
    for autograd, pair in zip(*results, strict=True):
        assert torch.equal(autograd, pair) and bool(pair.any())


def amaxes(module):
    return [state.amax_history.clone() for state in module.scaling.values()]
