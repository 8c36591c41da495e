"""Layers as one operator of compiled code: they give the bits of eager mode.

With some arguments and settings, compiled code calls the parts of a layer instead.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chain_graphs import ChainGraphs
from compiled_graphs import saved_and_run
from fused_layers import KINDS, batch, build, make_of, moved, results
from module_reference import LEAST, sqnr
from precisions import RECIPES
from rulers import assert_bitwise
from sizes import as_large_inputs
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention import stage
from transformer_engine.pytorch.attention.backends import BACKENDS, choice
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.fp8.scaling_state import FORWARD

# On GPUs, compiled code runs these on another backend, which rounds differently.
OTHER_ATTENTION = {"window", "slopes"}
BY_PARTS = {
    *("dropout", "dropout of a tracker", "dropped paths"),
    *("sink", "parallel", "decoder with groups"),  # the last two have dropout of hidden states
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes gradients deterministic, and attention on the CPU recordable, as it is with cuDNN."""
    reset_autocast()
    torch._dynamo.reset()
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if torch.cuda.is_available():
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
        return
    (unfused,) = [one for one in BACKENDS if one.name == "unfused"]
    recordable = (unfused._replace(recordable=lambda call: True, records_on=("cpu",)),)
    # `_choose` is memoised, so replacing `BACKENDS` alone has no effect on it.
    monkeypatch.setattr(choice, "_choose", lambda *facts: recordable[0])
    monkeypatch.setattr(stage, "BACKENDS", recordable)


def compare(layer: Any, recipe: str, device: str, case: str = "", **call: Any) -> ChainGraphs:
    """Compares a layer in eager mode and compiled: bit by bit if both run on the same backend."""
    near = device == "cuda" and case in OTHER_ATTENTION
    call, twin, graphs = moved(call, device), copy.deepcopy(layer), ChainGraphs()
    expected, _, _ = results(layer, recipe, device, **call)
    compiled = torch.compile(twin, backend=graphs, fullgraph=True, dynamic=False)
    found, _, _ = results(compiled, recipe, device, **call)
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) is (wanted is None)
        if got is None:
            continue
        if not near:
            assert_bitwise(got, wanted)
        elif got.dim() == 3:  # results, and gradients of inputs
            assert sqnr(got, wanted) > LEAST[recipe if recipe in LEAST else "bf16"]
    return graphs


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("encoder", recipe) for recipe in RECIPES]
    + [
        (kind, "delayed" if i % 2 else "high precision")
        for i, kind in enumerate(KINDS)
        if kind not in BY_PARTS
    ],
)
def test_one_operator(device: str, kind: str, recipe: str) -> None:
    call = {"encoder_output": batch(device, 5, 24).detach()} if "decoder" in kind else {}
    graphs = compare(make_of(kind, device), recipe, device, kind, **call)
    if not (device == "cuda" and kind in OTHER_ATTENTION):
        assert (graphs.chains, graphs.others) == (1, 0)
    assert len(graphs.keys) == 2, "training and evaluation, each compiled once"


@pytest.mark.parametrize(
    ("kind", "length"),
    [("encoder", 4), ("groups", 1), ("no mask", 3), ("attention alone", 4)],
)
@pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")
def test_fp8_attention(
    device: str, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 attention has a scaling state of its own, in addition to those of the projections."""
    recipe = DelayedScaling(amax_history_len=length, fp8_dpa=True)
    monkeypatch.setitem(RECIPES, "fp8 attention", recipe)
    layer = make_of(kind, device)
    graphs = compare(layer, "fp8 attention", device, kind)
    assert (graphs.chains, graphs.others) == (1, 0)
    attention = layer if kind == "attention alone" else layer.self_attention
    assert (attention.core_attention.scaling[FORWARD].scale != 1.0).any()


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("kind", ["encoder", "groups"])
def test_rotation(device: str, kind: str) -> None:
    angles = te.RotaryPositionEmbedding(8)(40)
    graphs = compare(make_of(kind, device), "delayed", device, rotary_pos_emb=angles)
    assert (graphs.chains, graphs.others) == (1, 0)


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("kind", ["encoder", "RMSNorm, swiglu"])
def test_layers_that_are_alike_share_an_operator(device: str, kind: str) -> None:
    graphs = compare(nn.Sequential(*(make_of(kind, device) for _ in range(2))), "current", device)
    for keys in graphs.keys:  # of training and evaluation
        assert len(keys) == 2 and len(set(keys)) == 1


ARGUMENTS: dict[str, dict[str, Any]] = {
    "mask": {
        "self_attn_mask_type": "arbitrary",
        "attention_mask": torch.ones(16, 16).triu(2).bool(),
    },
    "slopes": {"core_attention_bias_type": "alibi"},
    "first microbatch": {"is_first_microbatch": True},
    "recomputed": {"checkpoint_core_attention": True},
}


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_need_parts(device: str, case: str) -> None:
    graphs = compare(build(device), "delayed", device, case, **ARGUMENTS[case])
    assert graphs.chains != 1 or graphs.others


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("kind", ["dropout", "dropped paths", "parallel"])
def test_random_numbers_need_parts(device: str, kind: str) -> None:
    graphs, layer = ChainGraphs(), make_of(kind, device)
    torch.compile(layer, backend=graphs, fullgraph=True)(batch(device)).sum().backward()
    assert graphs.chains != 1 or graphs.others


class Doubled(te.LayerNormMLP):
    """A subclass, which does not inherit `joins_chains`."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return super().forward(*arguments, **keywords) * 2


def _hook(layer: Any, device: str) -> None:
    layer.self_attention.proj.register_forward_hook(lambda module, inputs, output: output * 2)


def _subclass(layer: Any, device: str) -> None:
    kind = {"params_dtype": torch.bfloat16, "device": device, "return_layernorm_output": False}
    layer.layernorm_mlp = Doubled(64, 128, **kind)


@pytest.mark.parametrize("observe", [_hook, _subclass])
def test_observers_are_called(device: str, observe: Any) -> None:
    layer, graphs = build(device), ChainGraphs()
    torch.manual_seed(1)
    observe(layer, device)
    x = batch(device)
    expected = layer(x)
    found = torch.compile(layer, backend=graphs, fullgraph=True)(x)
    assert_bitwise(found, expected)
    assert graphs.chains > 1


def test_large_inputs_are_traced_stage_by_stage(device: str) -> None:
    """Dynamo sees one operator, AOTAutograd those of the stages; bits equal those of eager mode."""
    layer, x = build(device), batch(device)
    counts = []
    for large in (False, True):
        with as_large_inputs(large):
            _, found = saved_and_run(layer, x, "high precision")
            counts.append(found["forward chain_forward"])
            graphs = ChainGraphs()
            y = torch.compile(layer, backend=graphs, fullgraph=True)(x)
            assert_bitwise(y, layer(x))
            assert graphs.chains == 1
    assert counts == [1, 0]


def test_sizes_that_change(device: str) -> None:
    """Sizes are symbols, so the operator is traced stage by stage, once for all sizes."""
    layer = build(device)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (16, 24, 40):
        x = batch(device, length=length)
        twin = x.detach().clone().requires_grad_()
        with torch.compiler.set_stance("default" if length == 16 else "fail_on_recompile"):
            for y in (call(x), layer(twin)):
                y.sum().backward()
        assert_bitwise(x.grad, twin.grad)


def test_no_guard_asks_for_an_attribute_that_may_be_absent(device: str) -> None:
    """A guard on an absent attribute of a module raises and catches an error in every call."""
    asked: list[str] = []

    def keep(guards: Any) -> list[bool]:
        found = [guard.name for guard in guards if guard.guard_type == "HASATTR"]
        asked.extend([name for name in found if "_modules" in name])
        return [True] * len(guards)

    options = {"guard_filter_fn": keep}
    layer = torch.compile(build(device), backend="aot_eager", fullgraph=True, options=options)
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]):
        layer(batch(device))
    assert not asked
