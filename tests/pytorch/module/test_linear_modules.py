"""Behaviour of Linear, LayerNormLinear, LayerNormMLP and the norms, apart from arithmetic."""

import copy
import weakref

import pytest
import torch
from module_reference import sqnr
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.chain import gemm, segments
from transformer_engine.pytorch.chain.stages import activation as activation_stage
from transformer_engine.pytorch.chain.stages import norm as norm_stage
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer

RECIPE = DelayedScaling(amax_history_len=4)


def names(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_parameters_that_are_not_there_are_none() -> None:
    rms = te.LayerNormLinear(32, 48, normalization="RMSNorm", bias=False, device="cpu")
    assert rms.layer_norm_bias is None and rms.bias is None


def test_initial_values() -> None:
    module = te.LayerNormMLP(256, 512, device="cpu", zero_centered_gamma=True)
    assert module.fc1_weight.std().item() == pytest.approx(0.023, rel=0.05)
    assert not module.fc1_bias.any() and not module.layer_norm_weight.any()
    assert te.LayerNorm(8, device="cpu").weight.tolist() == [1.0] * 8
    ones = te.Linear(16, 16, init_method=torch.nn.init.ones_, device="cpu")
    assert ones.weight.min().item() == 1.0


@pytest.mark.parametrize("fp8", [False, True])
def test_return_bias_and_norm_output(device: str, fp8: bool) -> None:
    x = torch.randn(16, 32, device=device, requires_grad=True)
    plain = te.LayerNormLinear(32, 48, device=device)
    tapped = te.LayerNormLinear(
        32, 48, device=device, return_bias=True, return_layernorm_output=True
    )
    tapped.load_state_dict(plain.state_dict())
    with torch.no_grad():
        tapped.bias.add_(1.0)
        plain.bias.add_(1.0)
    with te.fp8_autocast(enabled=fp8, fp8_recipe=RECIPE):
        y = plain(x)
        out, bias, normed = tapped(x)
    torch.testing.assert_close(out + bias, y)
    by_torch = torch.nn.functional.layer_norm(x, (32,))
    torch.testing.assert_close(normed, by_torch)
    (expected,) = torch.autograd.grad(y.sum() + by_torch.square().sum(), x)
    (out.sum() + normed.square().sum()).backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)
    assert tapped.bias.grad is None


def test_return_bias_without_bias_is_none() -> None:
    _, bias = te.Linear(16, 16, bias=False, return_bias=True, device="cpu")(torch.ones(1, 16))
    assert bias is None


def test_inputs_of_any_rank(device: str) -> None:
    module = te.Linear(32, 48, device=device)
    for shape in [(32,), (3, 32), (2, 3, 32), (2, 1, 3, 32), (0, 32)]:
        x = torch.randn(shape, device=device, requires_grad=True)
        y = module(x)
        assert y.shape == (*shape[:-1], 48)
        y.sum().backward()
        assert x.grad.shape == x.shape
    strided = torch.randn(32, 5, device=device).T
    torch.testing.assert_close(module(strided), module(strided.contiguous()))


def test_frozen_parameters_and_inputs(device: str) -> None:
    module = te.Linear(32, 48, device=device)
    module.weight.requires_grad_(False)
    x = torch.randn(16, 32, device=device)
    for enabled in (False, True):
        module.bias.grad = None
        with te.fp8_autocast(enabled=enabled, fp8_recipe=RECIPE):
            module(x).sum().backward()
        assert module.weight.grad is None
        torch.testing.assert_close(module.bias.grad, torch.full((48,), 16.0, device=device))


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_parameters_of_another_16_bit_dtype_than_autocast(
    kind: type[torch.nn.Module], device: str
) -> None:
    found = []
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        module = kind(32, 48, params_dtype=torch.float16, device=device).to(dtype)
        x = torch.randn(16, 32, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            module(x).sum().backward()
        assert all(p.grad.dtype is dtype for p in module.parameters())
        found.append([p.grad.half() for p in module.parameters()])
    for one, other in zip(*found, strict=True):
        assert_bitwise(one, other)


def test_fused_weight_gradient_accumulation(device: str) -> None:
    module = te.Linear(32, 48, device=device, fuse_wgrad_accumulation=True)
    reference = te.Linear(32, 48, device=device)
    reference.load_state_dict(module.state_dict())
    module.weight.main_grad = torch.zeros(48, 32, device=device)
    x = torch.randn(16, 32, device=device)
    for first in (True, False):
        module(x, is_first_microbatch=first).sum().backward()
        reference(x).sum().backward()
    torch.testing.assert_close(module.weight.main_grad, reference.weight.grad)
    assert module.weight.grad is None
    torch.testing.assert_close(module.bias.grad, reference.bias.grad)


def test_fused_accumulation_runs_the_hooks_of_trainers(device: str) -> None:
    """Data-parallel trainers wait for these hooks; `grad` is a placeholder of zeros."""
    module = te.Linear(32, 48, device=device, fuse_wgrad_accumulation=True)
    weight = module.weight
    weight.main_grad = torch.zeros(48, 32, device=device)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = True
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad_added_to_main_grad))
    for enabled in (False, True):
        weight.grad = None
        with te.fp8_autocast(enabled=enabled, fp8_recipe=RECIPE):
            module(torch.ones(16, 32, device=device)).sum().backward()
    assert seen == [True, True]
    assert weight.grad.shape == weight.shape and not weight.grad.any()
    torch.testing.assert_close(weight.main_grad, torch.full_like(weight.main_grad, 32.0))


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_fused_accumulation_may_be_switched(kind: type, device: str) -> None:
    """Megatron-Core reads the attribute. It changes between two calls with equal shapes."""
    module = kind(32, 48, device=device)
    weight, x = module.weight, torch.ones(16, 32, device=device)
    weight.main_grad = torch.zeros(48, 32, device=device)
    module(x).sum().backward()
    plain, weight.grad = weight.grad, None
    module.fuse_wgrad_accumulation = True
    assert module.fuse_wgrad_accumulation
    module(x).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, plain)
    module.fuse_wgrad_accumulation = False
    module(x).sum().backward()
    torch.testing.assert_close(weight.grad, plain)
    torch.testing.assert_close(weight.main_grad, plain)


def test_fused_accumulation_needs_main_grad() -> None:
    module = te.Linear(32, 48, device="cpu", fuse_wgrad_accumulation=True, name="fc")
    with pytest.raises(ValueError, match=r"expected weight.main_grad .* got none \(layer fc\)"):
        module(torch.randn(4, 32))


@pytest.mark.parametrize(
    "recipe",
    [RECIPE, Float8CurrentScaling(), Float8BlockScaling()],
    ids=["delayed", "current", "blocks"],
)
def test_microbatches_cast_the_weight_once(device: str, recipe) -> None:
    module = te.Linear(32, 48, device=device)
    x = torch.randn(16, 32, device=device)
    with te.fp8_autocast(fp8_recipe=recipe):
        first = module(x, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.zero_()
    with te.fp8_autocast(fp8_recipe=recipe):
        second = module(x, is_first_microbatch=False)
        third = module(x, is_first_microbatch=None)
    assert sqnr(second, first) > 20
    assert not (third - module.bias).any()


def test_meta_device_and_reset(device: str) -> None:
    module = te.LayerNormMLP(32, 64, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters()
    assert not any(p.is_meta for p in module.parameters())
    assert module.layer_norm_weight.min().item() == 1.0
    with torch.device("meta"):
        assert te.Linear(16, 16).weight.is_meta
    split = te.Linear(32, 48, parameters_split=("a", "b"), device="meta")
    split.reset_parameters()
    assert split.a_weight.std().item() > 0


def test_attributes_for_tensor_parallel_trainers() -> None:
    column = te.Linear(16, 16, parallel_mode="Column", device="cpu")
    row = te.Linear(16, 16, parallel_mode="row", device="cpu")
    assert column.weight.tensor_model_parallel and column.weight.partition_dim == 0
    assert row.weight.partition_dim == 1 and row.weight.partition_stride == 1


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_autocast_sets_the_compute_dtype(device: str, kind) -> None:
    module = kind(32, 48, device=device)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    for enabled in (False, True):
        with (
            torch.autocast(device, torch.bfloat16),
            te.fp8_autocast(enabled=enabled, fp8_recipe=RECIPE),
        ):
            y = module(x)
        assert y.dtype is torch.bfloat16
        y.sum().backward()
        assert module.weight.grad.dtype is torch.float32 and x.grad.dtype is torch.float32


def test_wrong_dtypes_and_shapes_name_layer_and_parameter() -> None:
    module = te.Linear(32, 48, device="cpu", name="proj")
    with pytest.raises(TypeError, match=r"expected torch.bfloat16 .* got torch.float32 for weight"):
        module(torch.randn(4, 32, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"expected inp of float32, float16 or bfloat16, got torch"):
        module(torch.ones(4, 32, dtype=torch.int32))
    with pytest.raises(
        ValueError, match=r"expected inp of shape \(..., 32\), got \(4, 31\) \(layer"
    ):
        module(torch.randn(4, 31))
    with pytest.raises(ValueError, match="parallel_mode 'diagonal' not supported"):
        te.Linear(16, 16, parallel_mode="diagonal")
    with pytest.raises(TypeError, match=r"unexpected keyword argument.* colour"):
        te.Linear(16, 16, colour=1)
    with pytest.raises(ValueError, match="out_features divisible by tp_size=3, got 16"):
        te.Linear(16, 16, tp_size=3, parallel_mode="column")
    with pytest.raises(ValueError, match="in_features divisible by tp_size=3, got 16"):
        te.Linear(16, 16, tp_size=3, parallel_mode="row")
    with pytest.raises(ValueError, match="a of parameters_split divisible by tp_size=2, got 13"):
        te.Linear(16, 16, tp_size=2, parallel_mode="column", parameters_split={"a": 13, "b": 3})
    with pytest.raises(NotImplementedError, match="expected parallel_mode None or 'column'"):
        te.LayerNormLinear(16, 16, tp_size=2, parallel_mode="row")
    with pytest.raises(ValueError, match="ffn_hidden_size divisible by tp_size=3, got 16"):
        te.LayerNormMLP(16, 16, tp_size=3, set_parallel_mode=True)
    with pytest.raises(ValueError, match=r"\[GroupedLinear\] .* divisible by tp_size=3, got 16"):
        te.GroupedLinear(2, 16, 16, tp_size=3, parallel_mode="column")
    with pytest.raises(RuntimeError, match="TP group not initialized: expected set_tensor_par"):
        te.Linear(16, 16, tp_size=2, parallel_mode="row", device="cpu")(torch.ones(2, 8))
    with pytest.raises(NotImplementedError, match="Activation type foo is not supported"):
        te.LayerNormMLP(16, 16, activation="foo")
    with pytest.raises(ValueError, match=r"Unsupported normalization type 'BatchNorm'"):
        te.LayerNormLinear(16, 16, normalization="BatchNorm")
    with pytest.raises(ValueError, match=r"expected inp of shape \(\.\.\., 8\)"):
        te.RMSNorm(8, device="cpu")(torch.ones(2, 9))
    with pytest.raises(ValueError, match="expected recipe to be DelayedScaling, Float8Current"):
        te.fp8_autocast(fp8_recipe="delayed")


def test_sizes_that_fp8_cannot_take_fall_back_with_one_warning(device: str) -> None:
    module = te.Linear(40, 30, device=device, name="head")
    x = torch.randn(16, 40, device=device)
    te.gemm_report(reset=True)
    with (
        pytest.warns(UserWarning, match=r"divisible by 16 for FP8, got \(30, 40\).*layer head"),
        te.fp8_autocast(fp8_recipe=RECIPE),
    ):
        y = module(x)
    with te.fp8_autocast(fp8_recipe=RECIPE):
        module(x)  # a second warning would be an error
    assert te.gemm_report().total("fp8") == 0
    torch.testing.assert_close(y, module(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_stay_where_they_are(device: str, bad: float) -> None:
    module = te.Linear(32, 48, device=device)
    x = torch.randn(16, 32, device=device)
    x[3, 5] = bad
    for recipe in (RECIPE, Float8CurrentScaling(), Float8BlockScaling()):
        with torch.no_grad(), te.fp8_autocast(fp8_recipe=recipe):
            y = module(x)
        rows = torch.arange(16, device=device) != 3
        assert y[rows].isfinite().all()
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        with torch.no_grad(), te.fp8_autocast(fp8_recipe=recipe):
            zeros = module(torch.zeros(16, 32, device=device))
        torch.testing.assert_close(zeros, module.bias.expand(16, 48).detach())


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("recipe", [None, RECIPE, Float8CurrentScaling(), Float8BlockScaling()])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_compiled_equals_eager(device: str, kind: str, recipe) -> None:
    torch._dynamo.reset()
    eager = getattr(te, kind)(32, 64, device=device)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(16, 32, device=device, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        outputs = []
        for module, inp in ((eager, x), (compiled, other)):
            with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                outputs.append(module(inp))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs) and torch.equal(x.grad, other.grad)
    for p, q in zip(eager.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    if eager.scaling:
        with te.fp8_autocast():
            pass  # runs the updates that the compiled backward deferred
        for direction, state in eager.scaling.items():
            assert torch.equal(state.scale, twin.scaling[direction].scale)


def test_gemm_report_names_layers(device: str) -> None:
    te.gemm_report(reset=True)
    module = te.LayerNormMLP(32, 64, device=device, name="mlp")
    with te.fp8_autocast(fp8_recipe=RECIPE):
        module(torch.randn(16, 32, device=device, requires_grad=True)).sum().backward()
    report = te.gemm_report()
    assert report.counts == {
        (f"mlp.{fc}", gemm, "fp8"): 1
        for fc in ("fc1", "fc2")
        for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert "GEMMs: 6 fp8" in str(report)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()])
@pytest.mark.parametrize("tapped", [False, True])
def test_the_plain_norm_is_dropped_once_it_is_cast(monkeypatch, tapped, recipe) -> None:
    """It is freed before the GEMM runs, and so does not add to the peak of memory."""
    plain, alive = [], []
    norm_forward, fprop = norm_stage.norm_forward, gemm.fprop

    def watched_norm(*arguments):
        results = norm_forward(*arguments)
        plain.append(weakref.ref(results[0]))
        return results

    def watched_fprop(*arguments):
        alive.append(plain[0]() is not None)
        return fprop(*arguments)

    monkeypatch.setattr(segments, "_segments_of", lambda *_: [])
    monkeypatch.setattr(norm_stage, "norm_forward", watched_norm)
    monkeypatch.setattr(gemm, "fprop", watched_fprop)
    layer = te.LayerNormLinear(32, 48, return_layernorm_output=tapped, device="cpu")
    with te.fp8_autocast(fp8_recipe=recipe):
        layer(torch.randn(16, 32))
    assert alive == [tapped]


def test_current_scaling_drops_the_gradient_of_an_activation_before_the_cast(monkeypatch) -> None:
    gradients, alive = [], []
    activation_backward, cast = activation_stage.activation_backward, CurrentQuantizer.cast

    def watched_backward(grad, *arguments, **named):
        gradients.append(weakref.ref(grad))
        return activation_backward(grad, *arguments, **named)

    def watched_cast(*arguments):
        alive.extend(gradient() is not None for gradient in gradients)
        return cast(*arguments)

    monkeypatch.setattr(segments, "_segments_of", lambda *_: [])
    monkeypatch.setattr(activation_stage, "activation_backward", watched_backward)
    monkeypatch.setattr(CurrentQuantizer, "cast", watched_cast)
    module = te.LayerNormMLP(32, 64, device="cpu")
    with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
        y = module(torch.randn(16, 32))
    y.sum().backward()
    assert alive == [False]


def test_a_device_context_is_obeyed(device: str) -> None:
    """Also a context of the CPU on a machine with a GPU. The default device is the GPU, if any."""
    with torch.device(device):
        assert te.Linear(16, 16).weight.device.type == device
        with torch.device("meta"):
            assert te.Linear(16, 16).weight.is_meta
    torch.set_default_device(device)
    try:
        assert te.Linear(16, 16).weight.device.type == device
    finally:
        torch.set_default_device(None)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert te.Linear(16, 16).weight.device.type == expected
