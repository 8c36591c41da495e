"""Delayed scaling of layers whose calls autograd does not record although gradients are enabled."""

import copy
from collections.abc import Callable

import pytest
import torch
from rulers import assert_bitwise
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.recipe_quantizers import FORWARD

# On a GPU, attention of a frozen layer runs on cuDNN, which announces how it runs.
pytestmark = pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")

RECIPE = DelayedScaling(amax_history_len=3, fp8_dpa=True)
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    "Quantize": te.ops.Quantize,
    "TransformerLayer": lambda: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    ),
}
CHECKPOINTS = {"te": te.checkpoint, "torch": checkpoint}


def forward_states(module: torch.nn.Module) -> list[torch.Tensor]:
    states = [m.scaling[FORWARD] for m in module.modules() if getattr(m, "scaling", None)]
    return [t for state in states for t in (state.scale, state.amax_history)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_scales_follow_the_data(name: str, compiled: bool, device: str) -> None:
    """They are those of a layer whose input needs a gradient; `no_grad` leaves no trace."""
    torch.manual_seed(0)
    frozen = LAYERS[name]().to(device).requires_grad_(False)
    other = copy.deepcopy(frozen)
    data = [1e-3 * torch.randn(16, 2, 32, device=device) for _ in range(3)]
    for module, needs in ((frozen, False), (other, True)):
        torch._dynamo.reset()
        call = torch.compile(module, backend="aot_eager") if compiled else module
        for x in data:
            with te.fp8_autocast(fp8_recipe=RECIPE):
                call(x.clone().requires_grad_(needs))
        with torch.no_grad(), te.fp8_autocast(fp8_recipe=RECIPE):
            call(100.0 * data[0])
    found, expected = forward_states(frozen), forward_states(other)
    assert found and any(bool((scale != 1.0).any()) for scale in found)
    for one, reference in zip(found, expected, strict=True):
        assert_bitwise(one, reference)


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoints(how: str, device: str) -> None:
    """A frozen layer before a trained one, both in one checkpoint."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(LAYERS["Linear"](), LAYERS["Linear"]()).to(device)
    plain[0].requires_grad_(False)
    data = [1e-3 * torch.randn(16, 32, device=device) for _ in range(3)]
    found = []
    for module, recomputes in ((plain, False), (copy.deepcopy(plain), True)):
        for x in data:
            with te.fp8_autocast(fp8_recipe=RECIPE):
                out = CHECKPOINTS[how](module, x, use_reentrant=False) if recomputes else module(x)
            out.sum().backward()
        states = [s for m in module for s in m.scaling.values()]
        found.append([t for state in states for t in (state.scale, state.amax_history)])
        found[-1] += [p.grad for p in module[1].parameters()]
    assert (found[0][0][:2] != 1.0).all()
    for one, other in zip(*found, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
def test_checkpoints_in_graphs(name: str, device: str) -> None:
    """Amaxes are those of a layer whose input needs a gradient."""
    torch.manual_seed(0)
    frozen = LAYERS[name]().to(device).requires_grad_(False)
    other = copy.deepcopy(frozen)
    x = 1e-3 * torch.randn(16, 2, 32, device=device)
    for module, needs in ((frozen, False), (other, True)):
        torch._dynamo.reset()
        call = torch.compile(
            lambda x, module=module: te.checkpoint(module, x, use_reentrant=False),
            backend="aot_eager",
        )
        with te.fp8_autocast(fp8_recipe=RECIPE):
            call(x.clone().requires_grad_(needs))
    for one, reference in zip(forward_states(frozen), forward_states(other), strict=True):
        assert_bitwise(one, reference)
