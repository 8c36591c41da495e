"""The queries of trainers' own checkpointing functions, and the order of their offloading."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context
from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)


class Recomputed(torch.autograd.Function):
    """The pattern of trainers: a forward without autograd, and a second one in the backward."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        ctx.fp8 = te.fp8.FP8GlobalStateManager.is_fp8_enabled()
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True):
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        again = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        with torch.enable_grad(), again, te.fp8_autocast(enabled=ctx.fp8):
            out = ctx.function(x)
        out.backward(grad)
        return None, x.grad


def test_checkpointing_functions_of_trainers(device: str) -> None:
    """The second forward uses the scales of the first, so gradients keep all bits."""
    layers = [te.Linear(32, 32, device=device) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    asked = []

    def asking(x: torch.Tensor) -> torch.Tensor:
        asked.append((is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()))
        return layers[1](x)

    for _ in range(3):
        x = torch.randn(16, 32, device=device)
        grads = []
        for run in (layers[0], lambda leaf: Recomputed.apply(asking, leaf)):
            leaf = x.clone().requires_grad_()
            with te.fp8_autocast():
                out = run(leaf)
            out.square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)
        assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)
    assert torch.equal(layers[0].get_extra_state(), layers[1].get_extra_state())
    assert asked == [(True, False), (True, True)] * 3
    assert not is_fp8_activation_recompute_enabled()


@pytest.mark.parametrize("enabled", [False, True])
def test_arguments_of_offloading_by_position(enabled: bool, device: str) -> None:
    numbers = (1, 2, True, False, True) if enabled else (0, 2, False, False, False)
    context, sync = get_cpu_offload_context(enabled, *numbers)
    layers = [te.Linear(32, 32, device=device) for _ in range(2)]
    x = torch.randn(16, 32, device=device, requires_grad=True)
    out = x
    for layer in layers:
        with context:
            out = layer(out)
        out = sync(out)
    out.sum().backward()
    expected = torch.ones(16, 32, device=device) @ layers[1].weight @ layers[0].weight
    torch.testing.assert_close(x.grad, expected, rtol=1e-2, atol=1e-3)
