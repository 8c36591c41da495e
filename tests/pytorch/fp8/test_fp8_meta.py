"""`module.fp8_meta`: the FP8 state under the keys that programs read; it refuses new values."""

import copy

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD

DELAYED = DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3)
SCALES = {"scaling_fwd": FORWARD, "scaling_bwd": BACKWARD}


def layer(kind=te.Linear, **arguments):
    return kind(32, 32, device="cpu", name="fc", **arguments)


def step(module, recipe=DELAYED, **arguments):
    with te.fp8_autocast(fp8_recipe=recipe, **arguments):
        module(torch.randn(16, 32)).sum().backward()
    return module


def test_before_the_first_call():
    module = layer()
    assert dict(module.fp8_meta) == {
        "recipe": te.get_default_recipe(),
        "fp8_group": None,
        "fp8_max_fwd": 448.0,
        "fp8_max_bwd": 57344.0,
        "num_gemms": 1,
        "fp8_checkpoint": False,
    }
    assert not (module.fp8_initialized or module.fp8 or module.fp8_calibration)
    assert module.fp8_meta.get("scaling_fwd") is None
    with pytest.raises(KeyError, match=r"'scaling_fwd' of a layer that has run .* \(layer fc\)"):
        module.fp8_meta["scaling_fwd"]
    with pytest.raises(KeyError, match="updated"):
        module.fp8_meta["updated"]


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_delayed_scaling(kind):
    module = step(layer(kind))
    meta = module.fp8_meta
    assert meta["recipe"] is DELAYED and meta["fp8_checkpoint"] and module.fp8_initialized
    assert meta["fp8_max_fwd"] == meta["fp8_max_bwd"] == 448.0
    assert meta["num_gemms"] == module.gemm_count
    for key, direction in SCALES.items():
        scales, state = meta[key], module.scaling[direction]
        assert scales.scale is state.scale and scales.amax_history is state.amax_history
        torch.testing.assert_close(scales.scale_inv * scales.scale, torch.ones_like(state.scale))
    assert meta["scaling_fwd"].scale.shape == (3 * module.gemm_count,)
    assert meta["scaling_bwd"].amax_history.shape == (3, 2 * module.gemm_count)


def test_scales_follow_the_steps():
    module = step(layer())
    first = module.fp8_meta["scaling_fwd"].scale.clone()
    with torch.no_grad():
        module.weight.mul_(4)
    step(module)
    step(module)
    assert not torch.equal(module.fp8_meta["scaling_fwd"].scale, first)


def test_regions_come_first():
    module = step(layer())
    with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
        assert module.fp8 and module.fp8_meta["recipe"] == Float8CurrentScaling()
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=DELAYED):
        assert module.fp8_calibration and not module.fp8
    assert module.fp8_meta["recipe"] is DELAYED and not module.fp8


def test_recipes_without_state():
    group = torch.distributed.ProcessGroup(0, 1)
    module = step(layer(), Float8CurrentScaling(), fp8_group=group)
    assert module.fp8_meta["recipe"] == Float8CurrentScaling() and module.fp8_initialized
    assert module.fp8_meta["fp8_group"] is group
    assert not module.fp8_meta["fp8_checkpoint"] and "scaling_fwd" not in module.fp8_meta


def test_loaded_and_copied_modules():
    source, target = step(layer()), layer()
    target.load_state_dict(source.state_dict())
    for module in (target, copy.deepcopy(source)):
        assert module.fp8_initialized and module.fp8_meta["fp8_checkpoint"]
        for key in SCALES:
            want, got = source.fp8_meta[key], module.fp8_meta[key]
            assert torch.equal(got.scale, want.scale)
            assert torch.equal(got.amax_history, want.amax_history)


def test_parts_lie_side_by_side():
    grouped = te.GroupedLinear(2, 32, 32, device="cpu", name="moe")
    with te.fp8_autocast(fp8_recipe=DELAYED):
        grouped(torch.randn(32, 32), [16, 16]).sum().backward()
    parts = [part.fp8_meta["scaling_fwd"].scale for part in grouped.parts()]
    assert grouped.fp8_meta["num_gemms"] == 2 and grouped.fp8_meta["recipe"] is DELAYED
    assert torch.equal(grouped.fp8_meta["scaling_fwd"].scale, torch.cat(parts))


def test_attention():
    attention = te.DotProductAttention(2, 16, name="core")
    assert attention.fp8_meta["num_gemms"] == attention.gemm_count
    assert not attention.fp8_initialized


def test_after_compiled_code():
    """Compiled code defers the updates of scales; reading `fp8_meta` runs them."""
    eager, compiled = layer(), layer()
    compiled.load_state_dict(eager.state_dict())
    x = torch.randn(16, 32)

    def forward(module):
        with te.fp8_autocast(fp8_recipe=DELAYED):
            return module(x)

    forward(eager).sum().backward()
    torch.compile(forward, fullgraph=True, backend="aot_eager")(compiled).sum().backward()
    for key in SCALES:
        assert torch.equal(compiled.fp8_meta[key].scale, eager.fp8_meta[key].scale)


@pytest.mark.parametrize("key", ["recipe", "fp8_checkpoint", "scaling_fwd", "made_up"])
def test_writes_are_refused(key):
    module = step(layer())
    text = rf"^\[fp8_meta\] expected no assignment, .* got one to '{key}': .* \(layer fc\)$"
    with pytest.raises(TypeError, match=text):
        module.fp8_meta[key] = None
    with pytest.raises(TypeError, match="got one to 'scale'"):
        module.fp8_meta["scaling_fwd"].scale = torch.ones(3)
    with pytest.raises(AttributeError):
        module.fp8_meta = {}


def test_programs_may_write_what_is_so():
    """Megatron writes the recipe and the group of the open autocast when it uses CUDA graphs."""
    module = layer()
    with te.fp8_autocast(fp8_recipe=DELAYED):
        module.fp8_meta["recipe"] = DELAYED
        module.fp8_meta["fp8_group"] = None


def test_fp8_parameters():
    with te.fp8_model_init():
        module = layer()
    assert module.fp8_parameters and not layer().fp8_parameters
    assert module.init_fp8_metadata(num_gemms=1) is None


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear", "MultiheadAttention"])
def test_scales_start_anew(kind):
    """After a reset, a module computes as a copy that never ran."""
    modules = {
        "Linear": layer,
        "GroupedLinear": lambda: te.GroupedLinear(2, 32, 32, device="cpu"),
        "MultiheadAttention": lambda: te.MultiheadAttention(32, 2, 16, 0.0, device="cpu"),
    }
    module = modules[kind]()
    fresh = copy.deepcopy(module)
    recipe = DelayedScaling(amax_history_len=3, fp8_dpa=kind == "MultiheadAttention")
    x = 100 * torch.randn(16, 2, 32) if kind == "MultiheadAttention" else 100 * torch.randn(16, 32)
    more = ([8, 8],) if kind == "GroupedLinear" else ()

    def run(one):
        with te.fp8_autocast(fp8_recipe=recipe):
            out = one(x, *more)
        out.sum().backward()
        return out

    first, second = run(module), run(module)
    assert not torch.equal(first, second)
    parts = [one for one in module.modules() if hasattr(one, "reset_fp8_meta_tensors")]
    for one in parts:
        one.reset_fp8_meta_tensors()
    for one in parts:
        for state in one.scaling.values():
            assert state.scale.eq(1).all() and not state.amax_history.any()
    assert torch.equal(run(module), first) and torch.equal(run(fresh), first)
    assert torch.equal(run(module), second) and torch.equal(run(fresh), second)


def test_a_reset_keeps_addresses():
    module = step(layer())
    before = [state.room.data_ptr() for state in module.scaling.values()]
    module.reset_fp8_meta_tensors()
    assert [state.room.data_ptr() for state in module.scaling.values()] == before
    key = te.fp8.FP8GlobalStateManager.get_meta_tensor_key
    assert module.fp8_meta[key(forward=True)].scale is module.scaling[FORWARD].scale
    assert module.fp8_meta[key(forward=False)].scale is module.scaling[BACKWARD].scale
