"""FP8 attention among other layers: checkpoints, CUDA graphs, and updates of scales."""

import copy

import pytest
import torch
from checkpoint_helpers import MODES
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD

# On a GPU the backend warns, once in a process, that it is not the fast one.
pytestmark = pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")

RECIPE = DelayedScaling(amax_history_len=3, fp8_dpa=True)
HEADS, SIZE, LENGTH = 4, 16, 24


@pytest.fixture(autouse=True)
def _without_cudnn(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")


class Block(nn.Module):
    """Attention with query, key and value from one tensor, alone or between two linear layers."""

    def __init__(self, alone, device):
        super().__init__()
        width = HEADS * SIZE
        self.core = te.DotProductAttention(HEADS, SIZE)
        self.before = None if alone else te.Linear(width, width, device=device)
        self.after = None if alone else te.Linear(width, width, device=device)

    def forward(self, x, **arguments):
        x = x if self.before is None else self.before(x)
        heads = x.view(*x.shape[:-1], HEADS, SIZE)
        x = self.core(heads, heads * 0.5, heads, **arguments)
        return x if self.after is None else self.after(x)


def steps_of(model, device, wrap=lambda f, *a: f(*a), recipe=RECIPE, **arguments):
    """Returns results, gradients and scaling state of three steps."""
    found = []
    for i in range(3):
        torch.manual_seed(i)
        x = (torch.randn(LENGTH, 2, HEADS * SIZE, device=device) * (i + 1)).requires_grad_()
        model.zero_grad()
        with te.fp8_autocast(fp8_recipe=recipe):
            out = wrap(lambda x: model(x, **arguments), x)
        out.square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [out.detach().clone(), x.grad, *grads, *states_of(model)]
    return found


def states_of(model):
    states = [s for m in model.modules() for s in getattr(m, "scaling", {}).values()]
    return [t.clone() for s in states for t in (s.scale, s.amax_history)]


def assert_all_bitwise(results, expected):
    assert len(results) == len(expected)
    for got, wanted in zip(results, expected, strict=True):
        assert_bitwise(got, wanted)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_change_nothing(mode, alone, device):
    model = Block(alone, device)
    twin = copy.deepcopy(model)
    assert_all_bitwise(steps_of(twin, device, MODES[mode]), steps_of(model, device))
    assert model.core.scaling[BACKWARD].scale[0] != 1.0


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_core_changes_nothing(dropout, device):
    model = Block(False, device)
    model.core.attention_dropout = dropout
    twin = copy.deepcopy(model)
    again = steps_of(twin, device, checkpoint_core_attention=True)
    assert_all_bitwise(again, steps_of(model, device))


def test_checkpoint_takes_attention_in_high_precision_too(device):
    """If attention runs without FP8 in the first forward, it does so in the recompute."""
    model = Block(False, device)
    twin = copy.deepcopy(model)
    recipe = DelayedScaling(amax_history_len=3)
    again = steps_of(twin, device, MODES["torch not reentrant"], recipe)
    assert_all_bitwise(again, steps_of(model, device, recipe=recipe))
    assert model.core.scaling == {}


def test_every_layer_of_a_step_is_updated(device):
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        64, 128, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=device
    )
    steps_of(layer, device)
    core = layer.self_attention.core_attention
    for module in (core, layer.self_attention.proj):
        backward = module.scaling[BACKWARD]
        assert backward.amax_history[0].count_nonzero() == 0
        assert backward.scale[0] != 1.0
    assert layer.state_dict()["self_attention.core_attention._extra_state"].numel() > 0


def test_a_layer_as_one_node(device):
    """Results, gradients, scales and amaxes equal those of the layer's parts, run one by one."""
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    layer = te.TransformerLayer(64, 128, HEADS, **options)
    twin = copy.deepcopy(layer)
    twin.self_attention.core_attention.register_forward_hook(lambda *call: None)
    expected = steps_of(twin, device)
    assert_all_bitwise(steps_of(layer, device), expected)
    assert layer._fused and not any(one._plans for one in twin._fused.values())


def test_plans_go_with_the_scaling_state(device):
    layer = te.DotProductAttention(HEADS, SIZE)
    x = [torch.randn(LENGTH, 2, HEADS, SIZE, device=device, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        with te.fp8_autocast(fp8_recipe=RECIPE):
            layer(*x)
        assert len(layer._core._plans) == 1
        layer.load_state_dict(layer.state_dict())
        assert not layer._core._plans


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [True, False])
def test_captured_in_a_graph(alone):
    """Callables of `make_graphed_callables` give the results and scales of eager mode."""
    eager = Block(alone, "cuda")
    graphed = copy.deepcopy(eager)
    sample = torch.randn(LENGTH, 2, HEADS * SIZE, device="cuda", requires_grad=True)
    te.make_graphed_callables(graphed, (sample,), fp8_enabled=True, fp8_recipe=RECIPE)
    assert_all_bitwise(steps_of(graphed, "cuda"), steps_of(eager, "cuda"))
    assert eager.core.scaling[FORWARD].scale[2] != 1.0
