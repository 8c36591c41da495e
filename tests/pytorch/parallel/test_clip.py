"""`te.distributed.clip_grad_norm_` in one process."""

import copy

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te


def test_norm_and_gradients_are_those_of_torch() -> None:
    model = nn.Sequential(te.Linear(32, 32, device="cpu"), nn.Linear(32, 16))
    model(torch.randn(4, 32)).square().sum().backward()
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.clone()
    norm = te.distributed.clip_grad_norm_(model, 0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(other.parameters(), 0.1))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_parameters_in_place_of_the_model_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^\[clip_grad_norm_\] expected a model.*got generator"):
        te.distributed.clip_grad_norm_(model.parameters(), 1.0)


def test_norms_that_are_no_numbers_are_refused() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TypeError, match=r"^\[clip_grad_norm_\] expected max_norm to be a number"):
        te.distributed.clip_grad_norm_(model, None)
    with pytest.raises(TypeError, match=r"^\[clip_factor\] expected max_norm .* number, got '1'"):
        te.optimizers.clip_factor(model.parameters(), "1")


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_norms_that_cannot_be_norms_are_refused(max_norm) -> None:
    """A negative factor would turn the steps round."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"^\[clip_factor\] expected max_norm >= 0, .*{max_norm}"):
        te.optimizers.clip_factor(model.parameters(), max_norm)
    with pytest.raises(ValueError, match=r"^\[clip_grad_norm_\] expected max_norm >= 0, got "):
        te.distributed.clip_grad_norm_(model, max_norm)


def test_the_factor_takes_parameters_only() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^\[clip_factor\] .* got Linear; pass its parameters\(\)"):
        te.optimizers.clip_factor(model, 1.0)
    with pytest.raises(TypeError, match=r"^\[clip_factor\] expected tensors, got tuple"):
        te.optimizers.clip_factor(model.named_parameters(), 1.0)
