"""`FusedSGD` uses torch's fused kernel only for parameters that the kernel steps correctly."""

import copy

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

from transformer_engine.pytorch.optimizers import FusedSGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sgd_steps_all_of_a_parameter(dtype, device):
    """On a CPU, torch's fused kernel does not step vectors of 16-bit values."""
    parameter = nn.Parameter(torch.ones(64, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    FusedSGD([parameter], lr=0.5).step()
    assert_bitwise(parameter.detach(), torch.full_like(parameter.detach(), 0.5))
    assert parameter._version > 0  # autograd refuses a backward that would read the new values


def test_a_loaded_state_does_not_choose_the_kernel(device):
    """The state is that of fp32 parameters, which the fused kernel steps correctly."""
    full, half = (nn.Parameter(torch.ones(64, device=device)) for _ in range(2))
    half = nn.Parameter(half.detach().bfloat16())
    optimizers = [FusedSGD([parameter], lr=0.5) for parameter in (full, half)]
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    half.grad = torch.ones_like(half)
    optimizers[1].step()
    assert_bitwise(half.detach(), torch.full_like(half.detach(), 0.5))


@pytest.mark.parametrize(
    "conversion", [{"dtype": torch.bfloat16}, {"memory_format": torch.channels_last}]
)
def test_modules_are_converted_behind_the_optimizer(conversion, device):
    """The fused kernel does not step the new parameters, or not on every device."""
    layer = nn.Conv2d(4, 4, 4, bias=False, device=device)
    optimizer = FusedSGD(layer.parameters(), lr=0.5)
    layer.to(**conversion)
    before = layer.weight.detach().clone()
    takes_scaler = device == "cpu" or layer.weight.dtype is not torch.bfloat16
    scaler = torch.amp.GradScaler(device, init_scale=2.0, enabled=takes_scaler)
    values = torch.arange(256.0, device=device).view(4, 4, 4, 4)
    scaler.scale((layer.weight * values).sum()).backward()
    layer.weight.grad = layer.weight.grad.contiguous()
    scaler.step(optimizer)
    assert_bitwise(layer.weight.detach(), before - 0.5 * values.to(before.dtype))


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_first_gradients_may_come_late(dtype, dampening, device):
    """The first momentum is the first gradient, even if other parameters had theirs earlier."""
    settings = {"lr": 0.1, "momentum": 0.5, "dampening": dampening, "weight_decay": 0.1}
    results = []
    for kind in (FusedSGD, torch.optim.SGD):
        own = [nn.Parameter(torch.ones(8, dtype=dtype, device=device)) for _ in range(3)]
        optimizer, calls = kind(own, **settings), []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        for some in ((0,), (0, 1), (1,), (0, 1, 2)):
            optimizer.zero_grad()
            for i in some:
                own[i].grad = torch.full_like(own[i], i + 0.5)
            optimizer.step()
        assert len(calls) == 4
        momenta = [optimizer.state[p]["momentum_buffer"] for p in own]
        results.append([*(p.detach() for p in own), *momenta])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_state_of_torch_and_a_grad_scaler(device):
    """Only the fused kernel takes the factor of a `GradScaler`."""
    parameter = nn.Parameter(torch.ones(64, device=device))
    other = torch.optim.SGD([nn.Parameter(torch.ones(64, device=device))], lr=0.5)
    optimizer = FusedSGD([parameter], lr=0.5)
    optimizer.load_state_dict(other.state_dict())
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert_bitwise(parameter.detach(), torch.full_like(parameter.detach(), 0.5))


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_first_step_that_a_grad_scaler_skips(dampening, device):
    """It leaves no momentum. torch's optimizer leaves uninitialised memory."""
    first, second = (nn.Parameter(torch.ones(64, device=device)) for _ in range(2))
    optimizer = FusedSGD([first], lr=0.5, momentum=0.5, dampening=dampening)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for parameters, factor in (([first], torch.inf), ([first], 1.0), ([first, second], torch.inf)):
        if len(parameters) > 1:
            optimizer.add_param_group({"params": [second]})
        optimizer.zero_grad()
        scaler.scale(sum((p * factor).sum() for p in parameters)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_bitwise(first.detach(), torch.full_like(first.detach(), 0.5))
    assert_bitwise(second.detach(), torch.ones_like(second.detach()))
    assert_bitwise(optimizer.state[first]["momentum_buffer"], torch.ones_like(first.detach()))
    assert "momentum_buffer" not in optimizer.state[second]
