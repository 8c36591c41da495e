"""Autograd functions applied by `apply_of`, with this project's `once_differentiable`."""

import pytest
import torch

from transformer_engine.pytorch._torch_private import apply_of, once_differentiable


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        assert not torch.is_grad_enabled()
        return 2 * grad


double = apply_of(Double)


def test_results_and_gradients():
    x = torch.ones(3, requires_grad=True)
    y = double(x)
    assert type(y.grad_fn).__name__ == "DoubleBackward"
    (grad,) = torch.autograd.grad(y, x, torch.ones(3))
    assert torch.equal(y, torch.full((3,), 2.0)) and torch.equal(grad, y)


def test_a_second_derivative_is_refused():
    x, upstream = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(double(x), x, upstream, create_graph=True)
    assert torch.equal(grad, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_transforms_are_told_what_they_need():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: double(x).sum())(torch.ones(3))
