"""Modules with FP8 weights: what they store, and that results equal those with plain weights."""

from contextlib import nullcontext

import pytest
import torch
from fp8_kinds import codes
from recordings import all_recorded, segments_of
from rulers import assert_bitwise
from torch.autograd.graph import saved_tensors_hooks

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.chain import segments
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    # With scales that are powers of two, a cast of the dequantised values gives the same codes.
    "current": Float8CurrentScaling(use_power_2_scales=True),
    "blocks": Float8BlockScaling(),
}
SIZES = {"blocks": 160}  # a full block, and a part of another
MODULES = {
    "Linear": lambda h, **kw: te.Linear(h, h + 16, **kw),
    "LayerNormLinear": lambda h, **kw: te.LayerNormLinear(h, h + 16, bias=False, **kw),
    "LayerNormMLP": lambda h, **kw: te.LayerNormMLP(h, 2 * h, activation="swiglu", **kw),
    "MultiheadAttention": lambda h, **kw: te.MultiheadAttention(
        h, 2, attention_dropout=0.0, fuse_qkv_params=True, input_layernorm=True, **kw
    ),
    "TransformerLayer": lambda h, **kw: te.TransformerLayer(
        h, 2 * h, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **kw
    ),
}
WEIGHTS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2, "MultiheadAttention": 2}
KINDS = {"current": Float8Tensor, "blocks": Float8BlockwiseQTensor}
# Each module with each recipe, from recordings and stage by stage.
CASES = [(m, r, recorded) for m in MODULES for r in RECIPES for recorded in (True, False)]


@pytest.fixture(params=["current", "blocks"])
def recipe(request) -> str:
    """A recipe for each class of FP8 tensor."""
    return request.param


def plainly(name: str, device: str, recipe: str = "current", **more) -> torch.nn.Module:
    return MODULES[name](SIZES.get(recipe, 32), device=device, **more)


def made(name: str, device: str, recipe: str = "current", **more) -> torch.nn.Module:
    with te.fp8_model_init(recipe=RECIPES[recipe]):
        return plainly(name, device, recipe, **more)


def inputs(recipe: str, *tokens: int, **how) -> torch.Tensor:
    return torch.randn(*tokens, SIZES.get(recipe, 32), **how)


def weights_of(module: torch.nn.Module) -> dict[str, QuantizedTensor]:
    return {n: p for n, p in module.named_parameters() if isinstance(p, QuantizedTensor)}


def at_rest(parameter: torch.Tensor) -> int:
    parts = parameter.parts if isinstance(parameter, QuantizedTensor) else (parameter,)
    return sum(part.nbytes for part in parts if part is not None)


def step(module, x, recipe, **call):
    """Output and gradients of one training step."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    scope = nullcontext() if recipe is None else te.fp8_autocast(fp8_recipe=RECIPES[recipe])
    with scope:
        out = module(x, **call)
    out.float().square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("name", MODULES)
def test_weights_of_gemms_are_fp8_and_nothing_else(name: str, recipe: str, device: str) -> None:
    torch.manual_seed(1)
    module = made(name, device, recipe, params_dtype=torch.bfloat16)
    torch.manual_seed(1)
    plain = plainly(name, device, recipe, params_dtype=torch.bfloat16)
    weights = weights_of(module)
    assert len(weights) == WEIGHTS.get(name, 4)
    for (key, parameter), (other_key, other) in zip(
        module.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert key == other_key and isinstance(parameter, torch.nn.Parameter)
        assert (parameter.shape, parameter.dtype) == (other.shape, other.dtype)
        assert (key in weights) == (parameter.ndim == 2)
        if key in weights:
            assert isinstance(parameter, KINDS[recipe])
            assert parameter.is_leaf and parameter.requires_grad
            assert parameter.partition_dim == other.partition_dim
            # Rounded once, with a scale that maps the largest magnitude to 224 or more.
            assert codes(parameter).bitwise_and(0x7F).amax().item() >= 0x76
            bound = other.abs() / 16 + other.abs().amax() / 448 / 512
            assert torch.all((parameter.dequantize() - other).abs() <= bound)
        else:
            assert_bitwise(parameter, other)
    assert sum(map(at_rest, weights.values())) <= 0.56 * sum(w.nbytes for w in weights.values())


@pytest.mark.parametrize("fused", [True, False])
def test_memory_of_a_layer_at_rest(fused: bool, recipe: str) -> None:
    def layer() -> te.TransformerLayer:
        options = {"fuse_qkv_params": fused, "params_dtype": torch.bfloat16, "device": "meta"}
        return te.TransformerLayer(4096, 16384, 32, **options)

    with te.fp8_model_init(recipe=RECIPES[recipe]):
        saved = layer()
    bf16 = sum(p.nbytes for p in layer().parameters())
    assert sum(map(at_rest, saved.parameters())) <= 0.51 * bf16


def test_meta_and_reset_parameters(recipe: str, device: str) -> None:
    with te.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        module = plainly("LayerNormMLP", "meta", recipe)
    assert isinstance(module.fc1_weight, KINDS[recipe]) and module.fc1_weight.is_meta
    module.to_empty(device=device)
    assert module.fc1_weight.device.type == device
    assert isinstance(module.fc1_weight, KINDS[recipe])
    module.reset_parameters()
    first = module.fc1_weight.get_high_precision_init_val()
    assert_bitwise(codes(module.fc1_weight), recast(module.fc1_weight, first))
    module.reset_parameters()
    assert not torch.equal(first, module.fc1_weight.get_high_precision_init_val())
    with torch.device(device):
        deferred = made("Linear", "meta", recipe)
        deferred.reset_parameters()
    assert isinstance(deferred.weight, KINDS[recipe]) and deferred.weight.device.type == device
    assert 0.018 < deferred.weight.dequantize().std() < 0.028


def recast(weight: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    return codes(weight._quantizer(values.to(weight.device)))


def test_preserved_initial_values(recipe: str) -> None:
    with te.fp8_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        layer = plainly("Linear", "cpu", recipe)
    assert layer.preserve_high_precision_init_val and layer.primary_weights_in_fp8
    values = layer.weight.get_high_precision_init_val()
    assert type(values) is torch.Tensor and values.dtype is torch.float32
    assert values.device.type == "cpu"
    assert_bitwise(recast(layer.weight, values), codes(layer.weight))
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None
    assert not hasattr(made("Linear", "cpu").weight, "get_high_precision_init_val")


@pytest.mark.parametrize("way", ["replaced", "assigned", "assigned to meta"])
def test_initial_values_of_a_weight_that_took_the_place_of_another(way: str, recipe: str) -> None:
    with te.fp8_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        layer = plainly("Linear", "meta" if way == "assigned to meta" else "cpu", recipe)
    if way == "replaced":
        layer.weight = torch.nn.Parameter(layer.weight.detach())
    else:
        layer.load_state_dict(plainly("Linear", "cpu", recipe).state_dict(), assign=True)
    layer.reset_parameters()
    values = layer.weight.get_high_precision_init_val()
    assert_bitwise(recast(layer.weight, values), codes(layer.weight))


def test_scopes_nest_and_what_fp8_cannot_take_stays() -> None:
    with te.fp8_model_init():
        with te.fp8_model_init(enabled=False):
            assert type(te.Linear(32, 32, device="cpu").weight) is torch.nn.Parameter
        with pytest.warns(UserWarning, match=r"weight of layer odd stays .* got \(30, 32\)"):
            odd = te.Linear(32, 30, device="meta", name="odd")
        odd.reset_parameters()  # without a second warning
        assert type(odd.weight) is torch.nn.Parameter
        assert type(te.LayerNorm(32, device="cpu").weight) is torch.nn.Parameter
    assert type(te.Linear(32, 32, device="cpu").weight) is torch.nn.Parameter

    @te.fp8_model_init()
    def build() -> te.Linear:
        return te.Linear(32, 32, device="cpu")

    assert isinstance(build().weight, Float8Tensor)


@pytest.mark.parametrize(("name", "recipe", "recorded"), CASES)
def test_computes_what_a_module_with_these_values_does(
    name: str, recipe: str, recorded: bool, device: str, monkeypatch
) -> None:
    if not recorded:
        monkeypatch.setattr(segments, "_segments_of", lambda *_: [])
    module = made(name, device, recipe, params_dtype=torch.bfloat16)
    plain = plainly(name, device, recipe, params_dtype=torch.bfloat16)
    x = inputs(recipe, 16, 2, device=device, dtype=torch.bfloat16)
    step(module, x, recipe)
    plain.load_state_dict(module.state_dict())
    for ours, theirs in zip(step(module, x, recipe), step(plain, x, recipe), strict=True):
        assert type(ours) is torch.Tensor
        assert_bitwise(ours, theirs)
    assert by_recordings(module) == by_recordings(plain)
    assert by_recordings(module) == ([True] if recorded else [])


def by_recordings(module: torch.nn.Module) -> list[bool]:
    """For each module with segments, whether forward and backward ran from recordings."""
    return [all_recorded(m) for m in module.modules() if segments_of(m)]


def test_nominal_dtype_and_torch_autocast(recipe: str, device: str) -> None:
    x = inputs(recipe, 32, device=device)
    module = made("LayerNormMLP", device, recipe, params_dtype=torch.bfloat16)
    found = step(module, x.bfloat16(), recipe)
    assert all(t.dtype is torch.bfloat16 for t in found)
    with pytest.raises(TypeError, match=r"expected torch.float32 .* got torch.bfloat16"):
        module(x)
    module = made("LayerNormMLP", device, recipe)
    with torch.autocast(device, torch.bfloat16):
        found = step(module, x, recipe)
    assert found[0].dtype is torch.bfloat16
    assert all(p.grad.dtype is torch.float32 for p in module.parameters())


def test_micro_batches_need_no_cache(recipe: str, device: str) -> None:
    module = made("LayerNormMLP", device, recipe, params_dtype=torch.bfloat16)
    x = inputs(recipe, 32, device=device, dtype=torch.bfloat16)
    expected = step(module, x, recipe)
    for first in (True, False):
        actual = step(module, x, recipe, is_first_microbatch=first)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_bitwise(ours, theirs)
    assert all(getattr(s, "cached_weight", None) is None for s in module.chain.stages)


def test_gradients_accumulate_in_the_nominal_dtype(recipe: str, device: str) -> None:
    module = made("Linear", device, recipe, params_dtype=torch.bfloat16)
    x = inputs(recipe, 16, device=device, dtype=torch.bfloat16)
    once = [g.clone() for g in step(module, x, recipe)[2:]]
    with te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
        out = module(x)
    out.float().square().mean().backward()
    for parameter, first in zip(module.parameters(), once, strict=True):
        assert type(parameter.grad) is torch.Tensor and parameter.grad.dtype is torch.bfloat16
        assert_bitwise(parameter.grad, 2 * first)


def test_main_grad_is_accumulated(recipe: str, device: str) -> None:
    module = made("Linear", device, recipe, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(module.weight.shape, device=device)
    x = inputs(recipe, 32, device=device)
    step(module, x, recipe)
    once = module.weight.main_grad.clone()
    step(module, x, recipe)
    torch.testing.assert_close(module.weight.main_grad, 2 * once)
    assert module.weight.grad is None and once.abs().sum() > 0


@pytest.mark.parametrize("recorded", [True, False])
def test_weights_are_neither_cast_nor_kept_twice(
    recorded: bool, recipe: str, device: str, monkeypatch
) -> None:
    if not recorded:
        monkeypatch.setattr(segments, "_segments_of", lambda *_: [])
    module = made("Linear", device, recipe, params_dtype=torch.bfloat16)
    x = inputs(recipe, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        saved: list[torch.Tensor] = []

        def keep(t: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(t)
            return t

        watched = saved_tensors_hooks(keep, lambda t: t)
        with watched, te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
            out = module(x)
        out.sum().backward()
        own = [t for t in saved if t.data_ptr() == codes(module.weight).data_ptr()]
        assert len(own) == 1
        others = sum(t.nbytes for t in saved if t is not own[0])
        # These are the codes of the input. No transpose of the weight is among them.
        assert others < x.numel() + module.weight.numel()
    assert sum(part is not None for part in module.weight.parts) == 2
    assert getattr(module.weight, "_transpose", None) is None
    assert by_recordings(module) == ([True] if recorded else [])


def test_outside_autocast_the_weight_is_dequantised(recipe: str, device: str) -> None:
    module = made("Linear", device, recipe)
    x = inputs(recipe, 16, device=device)
    with pytest.warns(UserWarning, match=r"weight is kept in FP8 and is dequantised .*layer Lay"):
        found = step(module, x, None)
    plain = plainly("Linear", device, recipe)
    plain.load_state_dict(module.state_dict())
    for ours, theirs in zip(found, step(plain, x, None), strict=True):
        assert_bitwise(ours, theirs)
    with te.fp8_autocast(enabled=False, calibrating=True):
        module(x)
    scale = module.scaling["forward"].scale[1].item()
    largest = module.weight.dequantize().abs().amax().item()
    assert scale == pytest.approx(448 / largest, rel=1e-6)
    plain.load_state_dict(module.state_dict())


def test_split_weights_are_joined_by_value(recipe: str, device: str) -> None:
    parts = (
        {"query": 16, "key": 16, "value": 144} if recipe == "blocks" else ("query", "key", "value")
    )
    size = SIZES.get(recipe, 32)
    with te.fp8_model_init(recipe=RECIPES[recipe]):
        module = te.Linear(size, size + 16, device=device, parameters_split=parts)
    assert set(weights_of(module)) == {"query_weight", "key_weight", "value_weight"}
    plain = te.Linear(size, size + 16, device=device, parameters_split=parts)
    x = inputs(recipe, 16, device=device)
    step(module, x, recipe)
    plain.load_state_dict(module.state_dict())
    for ours, theirs in zip(step(module, x, recipe), step(plain, x, recipe), strict=True):
        assert_bitwise(ours, theirs)


def test_frozen_weights_get_no_gradient(recipe: str, device: str) -> None:
    module = made("Linear", device, recipe)
    module.weight.requires_grad_(False)
    found = step(module, inputs(recipe, 16, device=device), recipe)
    assert found[1] is not None and module.weight.grad is None
    assert module.bias.grad is not None


def test_gradients_through_padding_and_no_tokens(recipe: str, device: str) -> None:
    module = made("Linear", device, recipe)
    for tokens in (0, 5, 16):
        found = step(module, inputs(recipe, tokens, device=device), recipe)
        assert found[0].shape == (tokens, module.weight.shape[0])
        assert module.weight.grad.shape == module.weight.shape


def test_another_parameter_may_take_the_place(recipe: str, device: str) -> None:
    module = made("Linear", device, recipe)
    x = inputs(recipe, 16, device=device)
    step(module, x, recipe)
    values = module.weight.dequantize()
    module.weight = torch.nn.Parameter(values)
    plain = step(module, x, recipe)
    with te.fp8_model_init(recipe=RECIPES[recipe]):
        other = plainly("Linear", device, recipe, init_method=lambda w: w.copy_(values))
    module.weight = other.weight
    for ours, theirs in zip(step(module, x, recipe), plain, strict=True):
        assert_bitwise(ours, theirs)
