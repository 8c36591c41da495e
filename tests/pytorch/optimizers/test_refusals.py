"""What optimizers refuse, which would otherwise read foreign memory or compute something else."""

import math

import pytest
import torch
from torch import nn

from transformer_engine.pytorch.optimizers import FusedAdam, multi_tensor_scale


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (torch.ones(1), ValueError, r"of shape \(2, 3\), as its parameter, got \(1,\)"),
        (torch.ones(3, 2), ValueError, r"of shape \(2, 3\), as its parameter, got \(3, 2\)"),
        (torch.ones(2, 3).long(), TypeError, "got torch.float32 and torch.int64"),
        (torch.ones(2, 3) * 1j, TypeError, "got torch.float32 and torch.complex64"),
        ([[1.0] * 3] * 2, TypeError, "got torch.float32 and list"),
    ],
)
def test_gradients_that_do_not_fit(capturable, gradient, error, message):
    """torch checks `parameter.grad`, but not `decoupled_grad`."""
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.decoupled_grad = gradient
    optimizer = FusedAdam([parameter], capturable=capturable, use_decoupled_grad=True)
    with pytest.raises(error, match=rf"^\[FusedAdam\] expected a .*{message}"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_parameters_without_floating_point(dtype):
    parameter = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TypeError, match=f"of floating point, got {dtype} and {dtype}"):
        FusedAdam([parameter]).step()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"betas": (0.9,)}, TypeError, r"betas to be a pair of numbers, got \(0.9,\)"),
        ({"betas": (0.9, 0.9, 0.9)}, TypeError, "betas to be a pair of numbers"),
        ({"betas": 0.9}, TypeError, "betas to be a pair of numbers, got 0.9"),
        ({"betas": ("a", 0.9)}, TypeError, r"betas\[0\] to be a number, got 'a'"),
        ({"betas": (0.9, math.nan)}, ValueError, r"betas in \[0, 1\)"),
        ({"lr": math.nan}, ValueError, "of 0 or more"),
        ({"weight_decay": math.nan}, ValueError, "of 0 or more"),
        ({"lr": torch.ones(2)}, ValueError, r"lr to be one number, got a tensor of shape \(2,\)"),
    ],
)
def test_settings_of_groups(settings, error, message):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    with pytest.raises(error, match=rf"^\[FusedAdam\] expected .*{message}"):
        FusedAdam(parameters, **settings)
    optimizer = FusedAdam(parameters[:1])
    with pytest.raises(error, match=rf"^\[FusedAdam\] expected .*{message}"):
        optimizer.add_param_group({"params": parameters[1:], **settings})


@pytest.mark.parametrize("capturable", [False, True])
def test_a_factor_for_each_parameter(capturable):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = FusedAdam([parameter], capturable=capturable)
    with pytest.raises(ValueError, match=r"grad_factor to be a tensor of one value .*\(2,\)"):
        optimizer.step(grad_factor=torch.ones(2))


def test_names_of_states():
    """Neither another name nor a mean before the first step gives the value of the parameter."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([parameter])
    with pytest.raises(ValueError, match=r"expected exp_avg of the parameter, .* got none"):
        optimizer.get_unscaled_state(parameter, "exp_avg")
    with pytest.raises(ValueError, match=r"expected state_name in .*master_param.*, got 'master'"):
        optimizer.get_unscaled_state(parameter, "master")
    with pytest.raises(ValueError, match=r"expected state_name in .*master_param.*, got 'exp'"):
        optimizer.set_scaled_state(parameter, "exp", torch.ones(2))
    assert torch.equal(optimizer.get_unscaled_state(parameter, "master_param"), torch.ones(2))


@pytest.mark.parametrize(
    ("lists", "scale", "message"),
    [
        ([[torch.ones(1)], [torch.ones(3)]], 2.0, r"same shapes, got \[\(1,\)\] and \[\(3,\)\]"),
        ([[torch.ones(2)] * 2, [torch.ones(2)]], 2.0, r"got \[\(2,\), \(2,\)\] and"),
        ([[torch.ones(2)]], 2.0, r"same shapes, got \[\(2,\)\]"),
        ([[torch.ones(2)]] * 2, torch.ones(2), r"scale to be one number, .* shape \(2,\)"),
    ],
)
def test_lists_to_scale(lists, scale, message):
    """An input of one element would be broadcast."""
    with pytest.raises(ValueError, match=rf"^\[multi_tensor_scale\] expected .*{message}"):
        multi_tensor_scale(1, torch.zeros(1, dtype=torch.int32), lists, scale)


def test_tensors_without_elements_are_scaled_too():
    flag, values = torch.zeros(1, dtype=torch.int32), [torch.ones(0), torch.ones(2)]
    multi_tensor_scale(1, flag, [values, values], 2.0)
    assert torch.equal(values[1], torch.full((2,), 2.0)) and not flag
    multi_tensor_scale(1, flag, [values[:1], values[:1]], 2.0)
    assert not flag
