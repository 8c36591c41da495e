"""Autograd of attention: checkpoints, changes in place, second derivatives, forward mode."""

import pytest
import torch
from cases.attention import BACKENDS as ALONE
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv
from torch.autograd import forward_ad

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import sdpa, unfused
from transformer_engine.pytorch.fp8.autocast_stack import Step

BACKENDS = {"sdpa": sdpa.BACKEND, "unfused": unfused.BACKEND}


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_of_gradients_are_an_error_in_words(name, monkeypatch):
    monkeypatch.setattr(core, "choose", lambda *call: BACKENDS[name])
    inputs = make_qkv()
    out = make_module()(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        gradients[0].sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attn_mask_type": "arbitrary", "attention_mask": torch.ones(5, 5).triu(2).bool()},
        {"core_attention_bias_type": "post_scale_bias"},
    ],
    ids=["causal", "mask", "bias"],
)
def test_a_checkpoint_saves_the_arguments_of_its_call(dropout, arguments, monkeypatch):
    """Its backward runs the forward again with the same random numbers.

    An argument that is changed in place before the backward is an error.
    """
    for name, value in ALONE["unfused"].items():
        monkeypatch.setenv(name, value)
    module, inputs = make_module(attention_dropout=dropout), make_qkv()
    if "core_attention_bias_type" in arguments:
        arguments = {**arguments, "core_attention_bias": torch.randn(4, 5, 5, requires_grad=True)}
    tensors = [*inputs, *(x for x in arguments.values() if isinstance(x, torch.Tensor))]
    known = {x.untyped_storage().data_ptr() for x in tensors}
    results = []
    for checkpoint in (False, True):
        saved = []
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, to=saved: to.append(x) or x, lambda x: x
        ):
            out = module(*inputs, checkpoint_core_attention=checkpoint, **arguments)
        wanted = [x for x in tensors if x.requires_grad]
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted), torch.rand(2)))
        assert checkpoint == all(x.untyped_storage().data_ptr() in known for x in saved)
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)

    for changed in tensors:
        out = module(*inputs, checkpoint_core_attention=True, **arguments)
        with torch.no_grad():
            changed.copy_(changed.clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [
        (torch.float32, None, torch.bfloat16),
        (torch.float32, torch.bfloat16, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None, torch.float16),
    ],
    ids=str,
)
def test_a_checkpoint_repeats_its_forward_wherever_torch_autocast_is(
    dtype, forward, backward, fp8, monkeypatch
):
    monkeypatch.setattr(core, "choose", lambda *call: unfused.BACKEND)
    inputs, bias = make_qkv(dtype=dtype), torch.randn(4, 5, 5, requires_grad=True)
    arguments = {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": bias}
    results = []
    for checkpoint in (False, True):
        module = make_module(attention_dropout=0.3)
        recipe = DelayedScaling(amax_history_len=2, fp8_dpa=True)
        torch.manual_seed(3)
        with autocast(forward), te.fp8_autocast(fp8, fp8_recipe=recipe):
            out = module(*inputs, checkpoint_core_attention=checkpoint, **arguments)
        with autocast(backward):
            results.append((out, *torch.autograd.grad(out.sum(), [*inputs, bias])))
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again) and bool(plain.any())


def autocast(dtype):
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


def test_a_checkpoint_of_tensors_on_meta(monkeypatch):
    monkeypatch.setattr(core, "choose", lambda *call: unfused.BACKEND)
    inputs = make_qkv("meta")
    module = make_module()
    out = module(*inputs, checkpoint_core_attention=True)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.is_meta and gradient.shape == inputs[0].shape


def test_a_result_may_be_changed_in_place_where_nothing_reads_it(monkeypatch):
    """With one head, the result is a view of the kernel's result."""
    monkeypatch.setattr(core, "choose", lambda *call: unfused.BACKEND)
    module, inputs = make_module(num_attention_heads=1), make_qkv(shape=(5, 2, 1, 8))
    expected = torch.autograd.grad((module(*inputs) * 3).sum(), inputs)
    out = module(*inputs)
    assert out.data_ptr() != module(*inputs).data_ptr()
    for gradient, wanted in zip(
        torch.autograd.grad(out.mul_(3).sum(), inputs), expected, strict=True
    ):
        assert torch.equal(gradient, wanted)
    monkeypatch.setattr(core, "choose", lambda *call: sdpa.BACKEND)
    out = module(*inputs).mul_(3)  # the backward of sdpa reads the result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_fp8_ends_the_step_once(monkeypatch):
    """The step ends with the backward, whichever inputs need a gradient."""
    ended = []
    monkeypatch.setattr(Step, "end_backward", lambda step: ended.append(1))
    recipe = DelayedScaling(amax_history_len=2, fp8_dpa=True)
    for needs in ((True, True, True), (False, True, False)):
        inputs = [
            x.requires_grad_(need) for x, need in zip(make_qkv(grad=False), needs, strict=True)
        ]
        with te.fp8_autocast(fp8_recipe=recipe):
            out = make_module()(*inputs, checkpoint_core_attention=needs[0])
        assert not ended
        out.sum().backward()
        assert len(ended) == 1
        ended.clear()


@pytest.mark.parametrize("recorded", [False, True])
def test_forward_mode_is_left_to_torch_or_refused(recorded, monkeypatch):
    """A call either returns the right tangent or raises an error."""
    module = make_module(kv_channels=(8, 16))  # torch composes such attention of other operators
    query, key, value = (torch.randn(5, 2, 4, size) for size in (8, 8, 16))
    query.requires_grad_(recorded)
    for backend in (sdpa.BACKEND, unfused.BACKEND):
        monkeypatch.setattr(core, "choose", lambda *call, chosen=backend: chosen)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(query, key)
            if backend is unfused.BACKEND:
                with pytest.raises(NotImplementedError, match="forward-mode"):
                    module(dual, key, value)
                continue
            tangent = forward_ad.unpack_dual(module(dual, key, value)).tangent
        step = 1e-2
        around = [module(query + sign * step * key, key, value) for sign in (1, -1)]
        expected = (around[0] - around[1]) / (2 * step)
        torch.testing.assert_close(tangent, expected, rtol=1e-2, atol=1e-3)
