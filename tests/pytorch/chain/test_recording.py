"""Recordings of chains give the same bits as stages that run one by one.

Calls that cannot be recorded run stage by stage.
"""

import weakref
from functools import partial

import pytest
import torch
from precisions import RECIPES, scope
from recordings import all_recorded, segments_of
from rulers import assert_bitwise
from sizes import as_large_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine import _C
from transformer_engine.pytorch.chain import recording, segment, segments
from transformer_engine.pytorch.chain.stand_ins import stand_ins_of
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast

MODULES = {
    "Linear": lambda **kw: te.Linear(32, 48, **kw),
    "Linear, no bias": lambda **kw: te.Linear(32, 48, bias=False, **kw),
    "LayerNormLinear, input": lambda **kw: te.LayerNormLinear(32, 48, return_input=True, **kw),
    "LayerNormLinear, output": lambda **kw: te.LayerNormLinear(
        32, 48, return_layernorm_output=True, normalization="RMSNorm", **kw
    ),
    "LayerNormMLP, gelu": lambda **kw: te.LayerNormMLP(32, 64, **kw),
    "LayerNormMLP, swiglu": lambda **kw: te.LayerNormMLP(32, 64, activation="swiglu", **kw),
    "LayerNorm": lambda **kw: te.LayerNorm(32, **kw),
}
pairs = pytest.mark.parametrize(
    ("name", "recipe"), [(name, recipe) for name in MODULES for recipe in RECIPES]
)


@pytest.fixture
def by_stages(monkeypatch):
    """A function: after it is called, no chain is recorded."""
    return lambda: monkeypatch.setattr(segments, "_segments_of", lambda *_: [])


def results(module, recipe, device, autocast=False, **call):
    """Results, gradients and amax histories of three training steps and an evaluation."""
    mixed = torch.autocast(device, torch.bfloat16, enabled=autocast)
    torch.manual_seed(3)
    found = []
    for step in range(3):
        x = torch.randn(2, 24, 32, dtype=torch.bfloat16, device=device).requires_grad_()
        with scope(recipe), mixed:
            out = module(x * 1.0, **call)
        outs = out if isinstance(out, tuple) else (out,)
        wanted = outs if step != 1 else outs[-1:]  # a loss without the first result
        torch.autograd.backward(wanted, [torch.randn_like(t) for t in wanted])
        found += [*outs, x.grad, *(p.grad for p in module.parameters())]
        for p in module.parameters():
            p.grad = None
    with torch.no_grad(), scope(recipe), mixed:
        out = module(x)
    found += out if isinstance(out, tuple) else (out,)
    return found + [s.amax_history for s in getattr(module, "scaling", {}).values()]


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise(a, b)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pairs
def test_the_bits_of_running_by_stages(device, by_stages, name, recipe, autocast):
    """With torch.autocast, the parameters are fp32 and are cast."""
    dtype = torch.float32 if autocast else torch.bfloat16
    module = MODULES[name](device=device, params_dtype=dtype)
    again = MODULES[name](device=device, params_dtype=dtype)
    again.load_state_dict(module.state_dict())
    got = results(module, recipe, device, autocast)
    te.gemm_report(reset=True)
    assert all(one.recorded is not None for one in segments_of(module))
    # torch adds the gradients of a norm's output that is also returned, so that backward
    # is not recorded.
    if not name.endswith("output"):
        assert all_recorded(module)
    by_stages()
    same(got, results(again, recipe, device, autocast))


def test_gemms_are_counted_alike(by_stages):
    module = te.LayerNormMLP(32, 64, device="cpu", params_dtype=torch.bfloat16, name="mlp")
    counts = []
    for _ in range(2):
        te.gemm_report(reset=True)
        results(module, "delayed", "cpu")
        counts.append(te.gemm_report(reset=True).counts)
        by_stages()
    assert counts[0] == counts[1]
    assert counts[0]["mlp.fc1", "wgrad", "fp8"] == 3


def test_kernels_are_called_by_the_recording_alone(monkeypatch):
    module = te.LayerNormMLP(32, 64, device="cpu", params_dtype=torch.bfloat16)
    results(module, "delayed", "cpu")
    for where in (segment, segments):
        monkeypatch.setattr(where, "run_forward", None)
        monkeypatch.setattr(where, "run_backward", None)
    results(module, "delayed", "cpu")


@pytest.mark.parametrize("recipe", ["delayed", "current", "blocks"])
def test_cached_weights(device, by_stages, recipe):
    """The first micro-batch of a step casts the weights; later ones must use the same codes."""
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        reset_autocast()
        module = te.Linear(32, 48, device=device, params_dtype=torch.bfloat16)
        for _ in range(3):
            for first in (True, False, False):
                x = torch.randn(16, 32, dtype=torch.bfloat16, device=device).requires_grad_()
                with scope(recipe):
                    y = module(x, is_first_microbatch=first)
                y.backward(torch.randn_like(y))
                found += [y.detach(), x.grad]
            with torch.no_grad():
                module.weight *= 1.5
        found.append(module.weight.grad)
        by_stages()
    same(found[: len(found) // 2], found[len(found) // 2 :])


def test_parameters_are_those_of_the_call(device):
    module = te.Linear(32, 48, device=device, params_dtype=torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=device)
    before = module(x)
    module.weight.data = module.weight.data * 2
    module.bias.data = module.bias.data * 2
    assert_bitwise(module(x), before * 2)
    with torch.no_grad():
        assert_bitwise(module(x), before * 2)


def test_a_weight_that_looks_different_runs_by_stages():
    module = te.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    module(x)
    module.weight.data = module.weight.data.t()
    strided = module(x)
    module.weight.data = module.weight.data.contiguous()
    assert_bitwise(strided, module(x))


def test_empty_inputs_run_by_stages(device):
    module = te.Linear(32, 48, device=device, params_dtype=torch.bfloat16)
    x = torch.ones(0, 32, dtype=torch.bfloat16, device=device).requires_grad_()
    for _ in range(2):
        with scope("delayed"):
            y = module(x)
        y.sum().backward()
    assert y.shape == (0, 48)
    assert all(one.recorded is None for one in segments_of(module))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP, gelu"])
def test_padded_tokens_are_recorded(device, by_stages, name, recipe):
    found = []
    for recorded in (True, False):
        torch.manual_seed(0)
        reset_autocast()
        module = MODULES[name](device=device, params_dtype=torch.bfloat16)
        for rows in (7, 40, 7):
            x = torch.randn(rows, 32, device=device, dtype=torch.bfloat16).requires_grad_()
            with scope(recipe):
                y = module(x)
            y.backward(torch.randn_like(y))
            found += [y.detach(), x.grad]
        found += [parameter.grad for parameter in module.parameters()]
        assert all_recorded(module) == recorded
        by_stages()
    same(found[: len(found) // 2], found[len(found) // 2 :])


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP, gelu"])
def test_checkpointing(device, name):
    """torch's checkpoint compares the tensors that the first forward and the recompute save."""
    module = MODULES[name](device=device, params_dtype=torch.bfloat16)
    grads = []
    for wrap in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        x = torch.ones(16, 32, dtype=torch.bfloat16, device=device).requires_grad_()
        with scope("current"):
            wrap(x).sum().backward()
        grads.append(x.grad)
    assert_bitwise(*grads)


def test_python_that_computes_is_refused():
    x = torch.ones(4)
    ours = stand_ins_of([x])
    found = recording.record([x], ours, (), [], lambda: ([ours[0] + 1], ()))
    assert found == "torch computes: aten.add.Tensor"
    found = recording.record([x], ours, (), [], lambda: ([ours[0].new_empty(4)], ()))
    assert isinstance(found, recording.Recorded)


def test_memory_that_nobody_has_named_is_refused():
    """If no input, output or persistent tensor holds an address, its memory may be reused."""
    x, unknown = torch.ones(4), torch.zeros(4, dtype=torch.bfloat16)

    def python(ours, y):
        _C.cast(ours[0], y)
        return [ours[0]], ()

    ours = stand_ins_of([x])
    found = recording.record([x], ours, (), [], lambda: python(ours, unknown))
    assert found == (
        "memory of bfloat16 (4) on cpu, which no input, output or persistent tensor holds"
    )
    found = recording.record([x], ours, (), [unknown], lambda: python(ours, unknown))
    assert isinstance(found, recording.Recorded)
    found.run([x])
    assert_bitwise(unknown, x.bfloat16())


def test_persistent_tensors_live_as_long_as_the_recording():
    x, scale = torch.ones(4), torch.zeros(4, dtype=torch.bfloat16)
    ours = stand_ins_of([x])

    def python(into):
        _C.cast(ours[0], into)
        return [ours[0]], ()

    found = recording.record([x], ours, (), [scale], partial(python, scale))
    assert isinstance(found, recording.Recorded)
    alive = weakref.ref(scale)
    del scale
    assert alive() is not None
    del found
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad_is_recorded_and_may_move(device, by_stages, recipe, dtype):
    """Recordings take `main_grad` as an input, because trainers may replace it in each step."""
    found = []
    for run in range(2):
        torch.manual_seed(7)
        reset_autocast()
        module = te.LayerNormMLP(
            32, 64, device=device, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True
        )
        weights = (module.fc1_weight, module.fc2_weight)
        for step in range(3):
            for weight in weights:
                weight.main_grad = torch.full_like(weight, step, dtype=dtype)
            x = torch.randn(2, 24, 32, dtype=torch.bfloat16, device=device).requires_grad_()
            with scope(recipe):
                y = module(x)
            y.backward(torch.randn_like(y))
            assert all(weight.grad is None for weight in weights)
            found += [y.detach(), x.grad, *(weight.main_grad for weight in weights)]
        if run == 0:
            assert all_recorded(module)
        by_stages()
    same(found[: len(found) // 2], found[len(found) // 2 :])


def test_scratch_memory_is_shared_by_tensors_that_do_not_meet():
    module = te.LayerNormMLP(64, 64, device="cpu", params_dtype=torch.bfloat16)
    with torch.no_grad(), scope("delayed"):
        module(torch.ones(64, 64, dtype=torch.bfloat16))
    (one,) = segments_of(module)
    # Bytes of the codes of each of x, w1, w2 and h. The results of FC1 and FC2 are bfloat16.
    codes = 64 * 64
    assert one.recorded.bytes < 8 * codes


def test_calls_that_need_much_memory_are_recorded_without_slabs(monkeypatch):
    monkeypatch.setattr("transformer_engine.pytorch.chain.segment._MOST_BYTES", 16000)
    module = te.LayerNormMLP(32, 64, device="cpu", params_dtype=torch.bfloat16)
    few, many = (torch.ones(rows, 32, dtype=torch.bfloat16) for rows in (16, 64))
    assert_bitwise(module(few), module(many)[:16])
    assert all_recorded(module)
    buffers = [len({p.slot for p in one.recorded.saved if p}) for one in segments_of(module)]
    assert buffers[0] < buffers[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [checkpoint, te.checkpoint])
def test_checkpoints_of_calls_that_need_much_memory(make, recipe, monkeypatch):
    """In the first step, too, the recompute must save the same tensors as the first forward."""
    found = []
    for most_bytes in (None, 4096):
        reset_autocast()
        if most_bytes is not None:
            monkeypatch.setattr(segment, "_MOST_BYTES", most_bytes)
        torch.manual_seed(0)
        module = te.LayerNormMLP(32, 64, device="cpu")
        x = torch.randn(64, 32, requires_grad=True)
        for _ in range(2):
            with scope(recipe):
                y = make(module, x, use_reentrant=False)
            y.square().sum().backward()
        assert all_recorded(module)
        found.append([y, x.grad, *(p.grad for p in module.parameters())])
    same(*found)


@pytest.mark.parametrize("recipe", ["high precision", "delayed", "current"])
def test_large_inputs_are_recorded_without_slabs(device, by_stages, recipe):
    """Each tensor is allocated alone, so that its memory is free after its last use."""
    with as_large_inputs():
        module = MODULES["LayerNormMLP, gelu"](device=device, params_dtype=torch.bfloat16)
        again = MODULES["LayerNormMLP, gelu"](device=device, params_dtype=torch.bfloat16)
        again.load_state_dict(module.state_dict())
        got = results(module, recipe, device)
        assert all_recorded(module)
        by_stages()
        same(got, results(again, recipe, device))


@pytest.mark.parametrize(
    "slabs", [recording.BOTH_SLABS, recording.Slabs(scratch=False, saved=False)]
)
def test_memory_is_free_as_soon_as_nobody_needs_it(slabs):
    """This includes inputs: the inputs of a backward are the tensors that the forward saved."""
    x, between = torch.full((4,), 3.0), torch.ones(4)
    ours = stand_ins_of([x, between])

    def python():
        scratch, result = (torch.empty(4, dtype=torch.bfloat16) for _ in range(2))
        _C.cast(ours[0], scratch)
        _C.cast(scratch, ours[1])
        _C.cast(ours[1], result)
        return [result], ()

    found = recording.record([x, between], ours, (), [], python, slabs)
    inputs = [x, between]
    alive = [weakref.ref(x), weakref.ref(between)]
    del x, between
    buffers = found.run(inputs)
    assert not inputs and not any(one() is not None for one in alive)
    (place,) = found.results
    assert_bitwise(place.within(buffers.pop(place.slot)), torch.full((4,), 3.0).bfloat16())
    assert sum(one is not None for one in buffers) == slabs.scratch


def test_inputs_that_begin_elsewhere_run_by_stages(device):
    """Where a kernel cannot read memory that is not aligned, Python copies it."""
    module = te.LayerNormLinear(32, 32, device=device, params_dtype=torch.bfloat16)
    memory = torch.randn(16 * 32 + 1, device=device).bfloat16()
    plain, shifted = memory[: 16 * 32].view(16, 32).clone(), memory[1:].view(16, 32)
    module(plain)
    expected = module(shifted.clone())
    assert_bitwise(module(shifted), expected)
    other = te.LayerNormLinear(32, 32, device=device, params_dtype=torch.bfloat16)
    other.load_state_dict(module.state_dict())
    assert_bitwise(other(shifted), expected)
    (one,) = segments_of(other)
    assert one.recorded is None and "16 bytes" in one.refused


@pytest.mark.parametrize(
    "make", [te.LayerNorm, te.RMSNorm, lambda size, **at: te.Linear(size, size, **at)]
)
def test_fake_and_meta_tensors_after_a_recorded_call(make):
    """They have no memory, so they cannot be inputs of a recording."""
    module = make(32, device="cpu")
    for _ in range(2):
        module(torch.randn(4, 32, requires_grad=True))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert module(torch.randn(4, 32)).shape == (4, 32)
    module.to("meta")
    assert module(torch.randn(4, 32, device="meta")).is_meta


def test_another_thread_may_call_a_layer_that_is_being_recorded(monkeypatch):
    module, x = te.LayerNormMLP(32, 64, device="cpu"), torch.ones(16, 32)
    found, made = [], segment.reader_of

    def interrupted(places):  # as if another thread called the module here
        monkeypatch.setattr(segment, "reader_of", made)
        found.append(module(x))
        return made(places)

    monkeypatch.setattr(segment, "reader_of", interrupted)
    with torch.no_grad():
        assert_bitwise(module(x), found[0])
