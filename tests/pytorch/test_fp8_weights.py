"""Modules that keep their weights in FP8: what they hold, and that they compute what others do."""

from contextlib import nullcontext

import pytest
import torch
from rulers import assert_bitwise
from torch.autograd.graph import saved_tensors_hooks

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.chain import Chain
from transformer_engine.pytorch.tensor import Float8Tensor

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    # What a power of two has scaled is cast to the same codes again.
    "current": Float8CurrentScaling(use_power_2_scales=True),
}
MODULES = {
    "Linear": lambda **kw: te.Linear(32, 48, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(32, 48, bias=False, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(32, 64, activation="swiglu", **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(
        32, 2, attention_dropout=0.0, fuse_qkv_params=True, input_layernorm=True, **kw
    ),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **kw
    ),
}
WEIGHTS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2, "MultiheadAttention": 2}
# Each module with each recipe on the stages, and half of them replayed.
CASES = [(m, r, replayed) for m in MODULES for r in RECIPES for replayed in (True, False)]


def made(name: str, device: str, recipe: str | None = None, **more) -> torch.nn.Module:
    with te.fp8_model_init(recipe=RECIPES.get(recipe)):
        return MODULES[name](device=device, **more)


def weights_of(module: torch.nn.Module) -> dict[str, Float8Tensor]:
    return {n: p for n, p in module.named_parameters() if isinstance(p, Float8Tensor)}


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
def test_weights_of_gemms_are_fp8_and_nothing_else(name: str, device: str) -> None:
    torch.manual_seed(1)
    module = made(name, device, params_dtype=torch.bfloat16)
    torch.manual_seed(1)
    plain = MODULES[name](device=device, params_dtype=torch.bfloat16)
    weights = weights_of(module)
    assert len(weights) == WEIGHTS.get(name, 4)
    for (key, parameter), (other_key, other) in zip(
        module.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert key == other_key and isinstance(parameter, torch.nn.Parameter)
        assert (parameter.shape, parameter.dtype) == (other.shape, other.dtype)
        assert (key in weights) == (parameter.ndim == 2)
        if key in weights:
            assert parameter.is_leaf and parameter.requires_grad
            assert parameter.partition_dim == other.partition_dim
            # Rounded once, with a scale that lets the largest magnitude be the largest code.
            assert parameter._data.bitwise_and(0x7F).amax().item() == 0x7E
            bound = other.abs() / 16 + other.abs().amax() / 448 / 512
            assert torch.all((parameter.dequantize() - other).abs() <= bound)
        else:
            assert_bitwise(parameter, other)
    at_rest = sum(w._data.nbytes + w._scale_inv.nbytes for w in weights.values())
    assert at_rest <= 0.56 * sum(w.nbytes for w in weights.values())


@pytest.mark.parametrize("fused", [True, False])
def test_memory_of_a_layer_at_rest(fused: bool) -> None:
    def layer() -> te.TransformerLayer:
        options = {"fuse_qkv_params": fused, "params_dtype": torch.bfloat16, "device": "meta"}
        return te.TransformerLayer(4096, 16384, 32, **options)

    with te.fp8_model_init():
        kept = layer()
    parts = [
        (p._data, p._scale_inv) if isinstance(p, Float8Tensor) else (p,) for p in kept.parameters()
    ]
    at_rest = sum(t.nbytes for part in parts for t in part)
    assert at_rest <= 0.51 * sum(p.nbytes for p in layer().parameters())


def test_meta_and_reset_parameters(device: str) -> None:
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        module = te.LayerNormMLP(32, 64, device="meta")
    assert isinstance(module.fc1_weight, Float8Tensor) and module.fc1_weight.is_meta
    module.to_empty(device=device)
    assert module.fc1_weight.device.type == device
    assert isinstance(module.fc1_weight, Float8Tensor)
    module.reset_parameters()
    first = module.fc1_weight.get_high_precision_init_val()
    assert_bitwise(module.fc1_weight._data, recast(module.fc1_weight, first))
    module.reset_parameters()
    assert not torch.equal(first, module.fc1_weight.get_high_precision_init_val())
    with torch.device(device):
        with te.fp8_model_init():
            deferred = te.Linear(32, 48, device="meta")
        deferred.reset_parameters()
    assert isinstance(deferred.weight, Float8Tensor) and deferred.weight.device.type == device
    assert 0.018 < deferred.weight.dequantize().std() < 0.028


def recast(weight: Float8Tensor, values: torch.Tensor) -> torch.Tensor:
    return weight._quantizer(values.to(weight.device))._data


def test_preserved_initial_values() -> None:
    with te.fp8_model_init(preserve_high_precision_init_val=True):
        layer = te.Linear(32, 48, device="cpu")
    assert layer.preserve_high_precision_init_val and layer.primary_weights_in_fp8
    values = layer.weight.get_high_precision_init_val()
    assert type(values) is torch.Tensor and values.dtype is torch.float32
    assert values.device.type == "cpu"
    assert_bitwise(recast(layer.weight, values), layer.weight._data)
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None
    assert not hasattr(made("Linear", "cpu").weight, "get_high_precision_init_val")


def test_scopes_nest_and_what_fp8_cannot_take_stays() -> None:
    with te.fp8_model_init():
        with te.fp8_model_init(enabled=False):
            assert type(te.Linear(32, 32, device="cpu").weight) is torch.nn.Parameter
        assert type(te.Linear(32, 30, device="cpu").weight) is torch.nn.Parameter
        assert type(te.LayerNorm(32, device="cpu").weight) is torch.nn.Parameter
    assert type(te.Linear(32, 32, device="cpu").weight) is torch.nn.Parameter

    @te.fp8_model_init()
    def build() -> te.Linear:
        return te.Linear(32, 32, device="cpu")

    assert isinstance(build().weight, Float8Tensor)


@pytest.mark.parametrize(("name", "recipe", "replayed"), CASES)
def test_computes_what_a_module_with_these_values_does(
    name: str, recipe: str, replayed: bool, device: str, monkeypatch
) -> None:
    if not replayed:
        monkeypatch.setattr(Chain, "replayed", lambda *_: None)
    module = made(name, device, recipe, params_dtype=torch.bfloat16)
    plain = MODULES[name](device=device, params_dtype=torch.bfloat16)
    x = torch.randn(16, 2, 32, device=device, dtype=torch.bfloat16)
    step(module, x, recipe)
    plain.load_state_dict(module.state_dict())
    for ours, theirs in zip(step(module, x, recipe), step(plain, x, recipe), strict=True):
        assert type(ours) is torch.Tensor
        assert_bitwise(ours, theirs)
    assert tapes(module) == tapes(plain)
    assert all(tapes(module)) is replayed


def tapes(module: torch.nn.Module) -> list[bool]:
    """Of every module with weights, whether forward and backward were repeated from a tape."""
    chains = [m for m in module.modules() if m._parameters and hasattr(m, "_runs")]
    replays = [
        [r for run in m._runs.values() for r in (run.replays or {}).values()] for m in chains
    ]
    return [
        bool(found) and all(r and all(r._backwards.values()) for r in found) for found in replays
    ]


def test_nominal_dtype_and_torch_autocast(device: str) -> None:
    x = torch.randn(32, 32, device=device)
    module = made("LayerNormMLP", device, params_dtype=torch.bfloat16)
    found = step(module, x.bfloat16(), "current")
    assert all(t.dtype is torch.bfloat16 for t in found)
    with pytest.raises(TypeError, match=r"expected torch.float32 .* got torch.bfloat16"):
        module(x)
    module = made("LayerNormMLP", device)
    with torch.autocast(device, torch.bfloat16):
        found = step(module, x, "delayed")
    assert found[0].dtype is torch.bfloat16
    assert all(p.grad.dtype is torch.float32 for p in module.parameters())


def test_micro_batches_need_no_cache(device: str) -> None:
    module = made("LayerNormMLP", device, params_dtype=torch.bfloat16)
    x = torch.randn(32, 32, device=device, dtype=torch.bfloat16)
    expected = step(module, x, "current")
    for first in (True, False):
        actual = step(module, x, "current", is_first_microbatch=first)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_bitwise(ours, theirs)
    assert all(getattr(s, "cached_weight", None) is None for s in module.chain.stages)


def test_gradients_accumulate_in_the_nominal_dtype(device: str) -> None:
    module = made("Linear", device, params_dtype=torch.bfloat16)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
    once = [g.clone() for g in step(module, x, "current")[2:]]
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        out = module(x)
    out.float().square().mean().backward()
    for parameter, first in zip(module.parameters(), once, strict=True):
        assert type(parameter.grad) is torch.Tensor and parameter.grad.dtype is torch.bfloat16
        assert_bitwise(parameter.grad, 2 * first)


def test_main_grad_is_accumulated(device: str) -> None:
    module = made("Linear", device, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(48, 32, device=device)
    x = torch.randn(32, 32, device=device)
    step(module, x, "current")
    once = module.weight.main_grad.clone()
    step(module, x, "current")
    torch.testing.assert_close(module.weight.main_grad, 2 * once)
    assert module.weight.grad is None and once.abs().sum() > 0


@pytest.mark.parametrize("replayed", [True, False])
def test_weights_are_neither_cast_nor_kept_twice(replayed: bool, device: str, monkeypatch) -> None:
    if not replayed:
        monkeypatch.setattr(Chain, "replayed", lambda *_: None)
    module = made("Linear", device, params_dtype=torch.bfloat16)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        kept: list[torch.Tensor] = []

        def keep(t: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(t)
            return t

        watched = saved_tensors_hooks(keep, lambda t: t)
        with watched, te.fp8_autocast(fp8_recipe=RECIPES["current"]):
            out = module(x)
        out.sum().backward()
        own = [t for t in kept if t.data_ptr() == module.weight._data.data_ptr()]
        assert len(own) == 1
        others = sum(t.nbytes for t in kept if t is not own[0])
        assert others < x.numel() + module.weight.numel()  # the input's codes, no transpose
    assert module.weight._transpose is None
    assert tapes(module) == [replayed]


def test_outside_autocast_the_weight_is_dequantised(device: str) -> None:
    module = made("Linear", device)
    x = torch.randn(16, 32, device=device)
    with pytest.warns(UserWarning, match=r"weight is kept in FP8 and is dequantised .*layer Lay"):
        found = step(module, x, None)
    plain = MODULES["Linear"](device=device)
    plain.load_state_dict(module.state_dict())
    for ours, theirs in zip(found, step(plain, x, None), strict=True):
        assert_bitwise(ours, theirs)
    with te.fp8_autocast(enabled=False, calibrating=True):
        module(x)
    scale = module.scaling["forward"].scale[1].item()
    assert scale == pytest.approx(module.weight._scale_inv[1].item(), rel=1e-6)


def test_recipes_of_another_family_are_refused() -> None:
    x = torch.randn(16, 32)
    with te.fp8_model_init(recipe=RECIPES["current"]):
        module = te.Linear(32, 48, device="cpu", name="first")
    with (
        te.fp8_autocast(),
        pytest.raises(RuntimeError, match=r"Recipe mismatch for 'weight'.*first"),
    ):
        module(x)
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        module(x)
    module = made("Linear", "cpu")  # made for no recipe, so for both
    for recipe in RECIPES.values():
        with te.fp8_autocast(fp8_recipe=recipe):
            module(x)
    with pytest.raises(ValueError, match="expected recipe to be DelayedScaling"):
        te.fp8_model_init(recipe=type("Other", (type(RECIPES["delayed"]).__mro__[1],), {})())


def test_margin_and_rounding_of_the_recipe() -> None:
    values = torch.randn(32, 16)
    for recipe, expected in (
        (DelayedScaling(margin=1), 448 / values.abs().max() / 2),
        (RECIPES["current"], 2 ** torch.floor(torch.log2(448 / values.abs().max()))),
    ):
        with te.quantized_model_init(recipe=recipe):
            layer = te.Linear(16, 32, device="cpu", init_method=lambda w: w.copy_(values))
        assert layer.weight._scale_inv[1].item() == expected.item()


def test_split_weights_are_joined_by_value(device: str) -> None:
    with te.fp8_model_init():
        module = te.Linear(32, 48, device=device, parameters_split=("query", "key", "value"))
    assert set(weights_of(module)) == {"query_weight", "key_weight", "value_weight"}
    plain = te.Linear(32, 48, device=device, parameters_split=("query", "key", "value"))
    x = torch.randn(16, 32, device=device)
    step(module, x, "current")
    plain.load_state_dict(module.state_dict())
    for ours, theirs in zip(step(module, x, "current"), step(plain, x, "current"), strict=True):
        assert_bitwise(ours, theirs)


def test_frozen_weights_get_no_gradient(device: str) -> None:
    module = made("Linear", device)
    module.weight.requires_grad_(False)
    x = torch.randn(16, 32, device=device)
    found = step(module, x, "delayed")
    assert found[1] is not None and module.weight.grad is None
    assert module.bias.grad is not None


def test_gradients_through_padding_and_no_tokens(device: str) -> None:
    module = made("Linear", device)
    for tokens in (0, 5, 16):
        found = step(module, torch.randn(tokens, 32, device=device), "current")
        assert found[0].shape == (tokens, 48) and module.weight.grad.shape == (48, 32)


def test_another_parameter_may_take_the_place(device: str) -> None:
    module = made("Linear", device)
    x = torch.randn(16, 32, device=device)
    step(module, x, "current")
    values = module.weight.dequantize()
    module.weight = torch.nn.Parameter(values)
    plain = step(module, x, "current")
    with te.fp8_model_init(recipe=RECIPES["current"]):
        module.weight = te.Linear(
            32, 48, device=device, init_method=lambda w: w.copy_(values)
        ).weight
    for ours, theirs in zip(step(module, x, "current"), plain, strict=True):
        assert_bitwise(ours, theirs)
