"""Layers on meta return tensors on meta. Tensors on meta beside others are an error."""

import re

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)


class Grouped(nn.Module):
    """A GroupedLinear that splits the rows into two halves."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(2, 32, 48, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // 32
        return self.experts(x, [rows // 2, rows - rows // 2])


MODULES = {
    "Linear": lambda device: te.Linear(32, 48, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(32, 48, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(32, 64, activation="swiglu", device=device),
    "GroupedLinear": Grouped,
    "LayerNorm": lambda device: te.LayerNorm(32, device=device),
    "RMSNorm": lambda device: te.RMSNorm(32, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(32, 2, device=device),
    "TransformerLayer": lambda device: te.TransformerLayer(32, 64, 2, device=device),
}
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}


def step(module: nn.Module, x: torch.Tensor, recipe: Recipe | None) -> list[torch.Tensor]:
    x.requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.sum().backward()
    return [y, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_a_step_on_meta_has_the_shapes_of_one_with_memory(kind: str, recipe: str) -> None:
    on_meta = step(MODULES[kind]("meta"), torch.ones(16, 2, 32, device="meta"), RECIPES[recipe])
    real = step(MODULES[kind]("cpu"), torch.ones(16, 2, 32), RECIPES[recipe])
    assert all(tensor.is_meta for tensor in on_meta)
    assert [(t.shape, t.dtype) for t in on_meta] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_a_layer_that_ran_on_meta_trains_when_it_has_memory(kind: str, recipe: str) -> None:
    layer, untouched = MODULES[kind]("meta"), MODULES[kind]("cpu").eval()
    step(layer.eval(), torch.ones(16, 2, 32, device="meta"), RECIPES[recipe])
    layer.to_empty(device="cpu")
    layer.load_state_dict(untouched.state_dict())
    layer.zero_grad()
    for _ in range(3):
        x = torch.randn(16, 2, 32)
        got = step(layer, x.clone(), RECIPES[recipe])
        expected = step(untouched, x.clone(), RECIPES[recipe])
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_layers_are_made_where_registration_puts_parameters_on_meta(
    kind: str, in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate.init_empty_weights` registers parameters like this."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            own = module._parameters[name]
            arguments = {**vars(own), "requires_grad": own.requires_grad}
            module._parameters[name] = type(own)(own.to("meta"), **arguments)

    monkeypatch.setattr(nn.Module, "register_parameter", register_empty)
    with te.fp8_model_init(enabled=in_fp8):
        layer = MODULES[kind]("cpu")
        monkeypatch.undo()
        usual = MODULES[kind]("cpu")
    for one, other in zip(layer.parameters(), usual.parameters(), strict=True):
        assert one.is_meta and type(one) is type(other)
        for name in ("sequence_parallel", "tensor_model_parallel", "partition_dim"):
            assert getattr(one, name, None) == getattr(other, name, None)
    layer.to_empty(device="cpu")
    layer.load_state_dict(usual.state_dict())
    for one, other in zip(layer.parameters(), usual.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_parameters_on_meta_keep_what_users_set(in_fp8: bool) -> None:
    with te.fp8_model_init(enabled=in_fp8):
        layer = te.Linear(32, 32, device="meta")
    layer.weight.requires_grad_(False)
    layer.weight.mark = layer.bias.mark = "mine"
    kind = type(layer.weight)
    with torch.device("cpu"):
        layer.reset_parameters()
    assert type(layer.weight) is kind and not layer.weight.is_meta
    assert not layer.weight.requires_grad and layer.bias.requires_grad
    assert layer.weight.mark == layer.bias.mark == "mine"


HEADS = torch.ones(8, 2, 4, 16)
ELSEWHERE = {
    "attention_mask": ({"attn_mask_type": "padding"}, (2, 1, 1, 8), torch.bool),
    "cu_seqlens_kv": (
        {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 8, 16]).int()},
        (3,),
        torch.int32,
    ),
    "core_attention_bias": (
        {"core_attention_bias_type": "post_scale_bias"},
        (1, 4, 8, 8),
        torch.float32,
    ),
    "alibi_slopes": ({"core_attention_bias_type": "alibi"}, (4,), torch.float32),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_attention_names_what_is_elsewhere(name: str) -> None:
    others, shape, dtype = ELSEWHERE[name]
    attention = te.DotProductAttention(4, 16, name="core")
    arguments: dict = {**others, name: torch.empty(shape, dtype=dtype, device="meta")}
    text = f"{name} on cpu, where query_layer is, got meta (layer core)"
    with pytest.raises(ValueError, match=re.escape(f"[DotProductAttention] expected {text}")):
        attention(HEADS, HEADS, HEADS, **arguments)
    with pytest.raises(ValueError, match=r"expected value_layer on cpu, where query_layer is, got"):
        attention(HEADS, HEADS, HEADS.to("meta"))


def test_other_calls_name_what_is_elsewhere() -> None:
    x, target = torch.ones(4, 16), torch.zeros(4, dtype=torch.long)
    mha = te.MultiheadAttention(64, 4, device="cpu", name="mha")
    angles = te.RotaryPositionEmbedding(16)(8).to("meta")
    for call, text in (
        (
            lambda: te.parallel_cross_entropy(x, target.to("meta")),
            "[parallel_cross_entropy] expected target on cpu, where inp is, got meta",
        ),
        (
            lambda: te.linear_cross_entropy(x, x.to("meta"), target),
            "[linear_cross_entropy] expected weight on cpu, where hidden is, got meta",
        ),
        (
            lambda: te.attention.apply_rotary_pos_emb(HEADS, angles),
            "[apply_rotary_pos_emb] expected freqs on cpu, where t is, got meta",
        ),
        (
            lambda: mha(HEADS.flatten(2), rotary_pos_emb=(angles, angles)),
            "expected rotary_pos_emb on cpu, where hidden_states is, got meta (layer mha)",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
    grouped = te.GroupedLinear(2, 16, 16, device="cpu", name="moe")
    with pytest.raises(TypeError, match=r"expected m_splits to be ints, got .*meta.*\(layer moe"):
        grouped(x, torch.tensor([2, 2], device="meta"))
