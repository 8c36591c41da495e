"""`main_grad` sums all uses of a weight since a forward with `is_first_microbatch=True`."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

RECIPE = Float8CurrentScaling()
STALE = 7.0  # what is in `main_grad` before the first micro-batch

CALLS = {
    "plain": lambda layer, x, first: layer(x, is_first_microbatch=first),
    "te.checkpoint": lambda layer, x, first: te.checkpoint(layer, x, is_first_microbatch=first),
    "not reentrant": lambda layer, x, first: te.checkpoint(
        layer, x, is_first_microbatch=first, use_reentrant=False
    ),
    "torch's": lambda layer, x, first: checkpoint(layer, x, first, use_reentrant=True),
    "torch's, not reentrant": lambda layer, x, first: checkpoint(
        layer, x, first, use_reentrant=False
    ),
}
ORDERS = {
    "1F1B": ("F0 B0 F1 B1 F2 B2", (True, False, False)),
    "pipeline": ("F0 F1 B0 F2 B1 B2", (True, False, False)),
    "last first": ("F0 F1 F2 B2 B1 B0", (True, False, None)),
    "several flags": ("F0 F1 F2 B1 B2 B0", (True, True, False)),
}


def mlp(**options):
    torch.manual_seed(0)
    layer = te.LayerNormMLP(32, 64, bias=False, device="cpu", **options)
    for weight in (layer.fc1_weight, layer.fc2_weight):
        weight.main_grad = torch.full_like(weight, STALE)
    return layer


def inputs(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator).requires_grad_() for _ in range(count)]


def sums_of_uses(layer, fp8, count=3):
    """The sums in `grad` of a layer that does not use `main_grad`."""
    layer.fuse_wgrad_accumulation = False
    for number, x in enumerate(inputs(count)):
        with te.fp8_autocast(enabled=fp8, fp8_recipe=RECIPE):
            loss = layer(x).sum() * (number + 1)
        loss.backward()
    return [layer.fc1_weight.grad, layer.fc2_weight.grad]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_first_backward_overwrites_in_any_order(order, call, fp8):
    expected = sums_of_uses(mlp(), fp8)
    layer, (events, flags) = mlp(fuse_wgrad_accumulation=True), ORDERS[order]
    for _ in range(2):  # the second time from recordings
        losses, xs = {}, inputs()
        for event in events.split():
            number = int(event[1])
            if event[0] == "B":
                losses.pop(number).backward()
                continue
            with te.fp8_autocast(enabled=fp8, fp8_recipe=RECIPE):
                y = CALLS[call](layer, xs[number], flags[number])
            losses[number] = y.sum() * (number + 1)
        found = [layer.fc1_weight.main_grad, layer.fc2_weight.main_grad]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("delay", [False, True])
def test_one_backward_through_several_uses(first, delay):
    torch.manual_seed(0)
    layer = te.Linear(
        *(32, 32), fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, device="cpu"
    )
    layer.weight.main_grad = torch.full_like(layer.weight, STALE)
    weight, (x,) = layer.weight.detach().clone().requires_grad_(), inputs(1)
    for _ in range(2):
        layer(layer(x, True), first).sum().backward()
        for _ in range(2):
            layer.backward_dw()
    linear = torch.nn.functional.linear
    linear(linear(x, weight, layer.bias), weight, layer.bias).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, weight.grad)


def test_forwards_without_backward_leave_no_mark():
    layer = mlp(fuse_wgrad_accumulation=True)
    expected = sums_of_uses(mlp(), False)
    for number, x in enumerate(inputs()):
        loss = layer(x, number == 0).sum() * (number + 1)
        loss.backward()
        for call in CALLS.values():  # forwards without backward, while `loss` is alive
            call(layer, x, True)
            with torch.no_grad():
                evaluated = layer(x, True)
        gc.collect()
    assert not evaluated.requires_grad
    torch.testing.assert_close([layer.fc1_weight.main_grad, layer.fc2_weight.main_grad], expected)


def test_a_backward_without_gradients_of_weights_leaves_the_mark():
    """The first loss depends only on the output of the norm."""
    layer = te.LayerNormLinear(
        *(32, 32), bias=False, return_layernorm_output=True, fuse_wgrad_accumulation=True
    ).cpu()
    layer.weight.main_grad = torch.full_like(layer.weight, STALE)
    (x,) = inputs(1)
    first, second = layer(x, True), layer(x, False)
    first[1].sum().backward()
    second[0].sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, second[1].sum(0).expand(32, 32))


def test_layers_that_have_one_weight():
    one = te.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    other = te.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    weight = other.weight = one.weight
    weight.main_grad = torch.full_like(weight, STALE)
    plain, (x,) = weight.detach().clone().requires_grad_(), inputs(1)
    target = torch.arange(16)
    y = other(one(x, True), True)
    te.linear_cross_entropy(y, weight, target, fuse_wgrad_accumulation=True).sum().backward()
    linear = torch.nn.functional.linear
    logits = linear(linear(linear(x, plain), plain), plain)
    torch.nn.functional.cross_entropy(logits, target).backward()
    torch.testing.assert_close(weight.main_grad, plain.grad)


def test_weights_that_every_backward_overwrites():
    """Trainers that reduce `main_grad` after each backward set `overwrite_main_grad`."""
    layer = te.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.full_like(layer.weight, STALE)
    layer.weight.overwrite_main_grad = True
    linear, found, expected = torch.nn.functional.linear, [], []
    losses = [layer(layer(x)).sum() for x in inputs()]
    for loss in losses:
        loss.backward()
        found.append(layer.weight.main_grad.clone())
    for x in inputs():
        weight = layer.weight.detach().clone().requires_grad_()
        linear(linear(x, weight), weight).sum().backward()
        expected.append(weight.grad)
    torch.testing.assert_close(found, expected)
