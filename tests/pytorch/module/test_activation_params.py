"""`activation_params`: the clamped SwiGLU of gpt-oss in modules, in every precision; errors."""

import copy
import pickle

import pytest
import torch
from cases import activation as cases
from module_reference import LEAST, sqnr
from precisions import RECIPES, scope
from recordings import all_recorded
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.pytorch.chain import segments

HIDDEN, FFN = 32, 64
NUMBERS = {"limit": 0.8, "alpha": 1.3, "glu_linear_offset": 0.5}
CLAMPED = {"activation": "clamped_swiglu", "activation_params": NUMBERS}


def made(device: str) -> te.LayerNormMLP:
    mlp = te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", device=device, **CLAMPED)
    with torch.no_grad():
        mlp.fc1_weight.mul_(10)  # so that the limit cuts off many values
    return mlp


def defined(mlp: te.LayerNormMLP, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output and the gradients of the sum of its squares, in float64."""
    p = {k: v.detach().double().cpu().requires_grad_() for k, v in mlp.named_parameters()}
    x = x.detach().double().cpu().requires_grad_()
    normed = torch.nn.functional.rms_norm(x, (HIDDEN,), p["layer_norm_weight"], mlp.eps)
    inner = normed @ p["fc1_weight"].t() + p["fc1_bias"]
    assert 0.1 < (inner.abs() > NUMBERS["limit"]).double().mean() < 0.9
    h = cases.clamped(inner, NUMBERS["limit"], NUMBERS["alpha"], NUMBERS["glu_linear_offset"])
    out = h @ p["fc2_weight"].t() + p["fc2_bias"]
    out.square().sum().backward()
    return out, x.grad, *(one.grad for one in p.values())


def step(module: torch.nn.Module, x: torch.Tensor, recipe: str) -> list[torch.Tensor]:
    """The output and all gradients of a training step."""
    x = x.clone().requires_grad_()
    with scope(recipe):
        out = module(x)
    out.square().sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in module.parameters())]
    for p in module.parameters():
        p.grad = None
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_follows_the_definition(recipe: str, device: str) -> None:
    """Run three steps: delayed scaling begins with scales of 1, and the first calls record."""
    mlp = made(device)
    x = torch.randn(64, HIDDEN, device=device)
    for _ in range(3):
        found = step(mlp, x, recipe)
    assert all_recorded(mlp)
    least = LEAST["fp32" if recipe == "high precision" else recipe]
    (out, *gradients), (expected, *others) = found, defined(mlp, x)
    assert sqnr(out, expected) > least
    # FP8 rounding may move a value across the limit, beyond which its gradient is zero.
    least = least if recipe == "high precision" else 6.0
    for got, other in zip(gradients, others, strict=True):
        assert sqnr(got, other) > least


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_way_to_run_it_has_the_same_bits(recipe: str, device: str, monkeypatch) -> None:
    torch._dynamo.reset()
    first, x = made(device), torch.randn(16, HIDDEN, device=device)
    again = made(device)
    again.checkpoint = True
    twins = [
        torch.compile(copy.deepcopy(first), fullgraph=True, backend="aot_eager"),
        pickle.loads(pickle.dumps(first)),
        again,
        copy.deepcopy(first),
    ]
    again.load_state_dict(first.state_dict())
    expected = [step(first, x, recipe) for _ in range(2)]
    for twin in twins:
        if twin is twins[-1]:
            monkeypatch.setattr(segments, "_segments_of", lambda *_: [])
        for want in expected:
            for a, b in zip(step(twin, x, recipe), want, strict=True):
                assert_bitwise(a, b)


def test_modules_that_differ_in_their_numbers_alone_are_compiled_apart(device: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(16, HIDDEN, device=device)
    mlp = made(device)
    for limit in (0.8, 0.3):
        numbers = {"limit": limit}
        other = te.LayerNormMLP(
            HIDDEN, FFN, activation="clamped_swiglu", activation_params=numbers, device=device
        )
        other.load_state_dict(mlp.state_dict(), strict=False)
        assert_bitwise(torch.compile(other, fullgraph=True, backend="aot_eager")(x), other(x))


def test_a_layer_hands_them_to_its_mlp(device: str) -> None:
    layer = te.TransformerLayer(
        HIDDEN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device, **CLAMPED
    )
    other = te.TransformerLayer(
        HIDDEN,
        FFN,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=device,
        activation="swiglu",
    )
    other.load_state_dict(layer.state_dict())
    other.layernorm_mlp = te.LayerNormMLP(HIDDEN, FFN, return_input=True, device=device, **CLAMPED)
    other.layernorm_mlp.load_state_dict(layer.layernorm_mlp.state_dict())
    x = torch.randn(16, 2, HIDDEN, device=device)
    assert_bitwise(layer(x), other(x))


@pytest.mark.parametrize(
    ("activation", "params", "error", "message"),
    [
        ("swiglu", NUMBERS, ValueError, "with activation='clamped_swiglu' alone, got .* 'swiglu'"),
        ("clamped_swiglu", {"limits": 7.0}, TypeError, "a dict with limit, alpha, glu_linear"),
        ("clamped_swiglu", 7.0, TypeError, r"\[LayerNormMLP\] expected .* a dict .*, got 7.0"),
        ("clamped_swiglu", {"limit": "7"}, TypeError, "expected limit to be a number, got '7'"),
        ("clamped_swiglu", {"alpha": True}, TypeError, "expected alpha to be a number, got True"),
        ("clamped_swiglu", {"limit": 0.0}, ValueError, "limit > 0 and alpha > 0, got"),
        ("clamped_swiglu", {"alpha": float("nan")}, ValueError, "expected finite numbers"),
    ],
)
def test_refusals(activation, params, error, message) -> None:
    with pytest.raises(error, match=message):
        te.LayerNormMLP(16, 16, activation=activation, activation_params=params, device="cpu")


def test_none_and_nothing_are_the_defaults() -> None:
    te.LayerNormMLP(16, 16, activation="gelu", activation_params={}, device="cpu")
    first = te.LayerNormMLP(16, 16, activation="clamped_swiglu", device="cpu")
    again = te.LayerNormMLP(
        16, 16, activation="clamped_swiglu", activation_params={"limit": 7}, device="cpu"
    )
    again.load_state_dict(first.state_dict())
    x = torch.randn(8, 16)
    assert_bitwise(first(x), again(x))
    assert_bitwise(te.ops.ClampedSwiGLU(limit=7)(x), te.ops.ClampedSwiGLU()(x))
    with pytest.raises(ValueError, match=r"\[ClampedSwiGLU\] expected finite numbers"):
        te.ops.ClampedSwiGLU(limit=-1.0)
