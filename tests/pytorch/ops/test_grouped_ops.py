"""`GroupedLinear` and `ScaledSwiGLU` in a sequence: the experts of a mixture."""

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import ops

GROUPS, HIDDEN, FFN = 3, 32, 48


def experts(device: str, bias: bool = True) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.GroupedLinear(GROUPS, HIDDEN, 2 * FFN, bias=bias, device=device),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(GROUPS, FFN, HIDDEN, bias=bias, device=device),
    )


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_experts(bias: bool, as_tensor: bool, device: str) -> None:
    model, sizes = experts(device, bias), [5, 0, 11]
    x = torch.randn(16, HIDDEN, device=device, requires_grad=True)
    scales = torch.rand(16, device=device, requires_grad=True)
    splits = torch.tensor(sizes, device=device) if as_tensor else sizes
    out = model(x, splits, scales, splits)
    parts = []
    for i, (rows, weights) in enumerate(zip(x.split(sizes), scales.split(sizes), strict=True)):
        up, down = [
            (
                getattr(model[j], f"weight{i}"),
                getattr(model[j], f"bias{i}") if bias else None,
            )
            for j in (0, 2)
        ]
        gate, linear = nn.functional.linear(rows, *up).chunk(2, -1)
        middle = nn.functional.silu(gate) * linear * weights[:, None]
        parts.append(nn.functional.linear(middle, *down))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    leaves = [x, scales, *model.parameters()]
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, upstream)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_it_is_the_module_in_fp8(device: str) -> None:
    module = te.GroupedLinear(GROUPS, HIDDEN, FFN, device=device)
    operation = ops.GroupedLinear(GROUPS, HIDDEN, FFN, device="meta", dtype=torch.float32)
    assert isinstance(operation, ops.FusibleOperation)
    for name, parameter in module.named_parameters():  # as programs that share parameters do
        setattr(operation, name, parameter)
    x = torch.randn(48, HIDDEN, device=device)
    te.gemm_report(reset=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        assert_bitwise(operation(x, [16, 0, 32]), module(x, [16, 0, 32]))
    assert te.gemm_report().total("fp8") > 0


def test_it_starts_as_linears_do() -> None:
    operation = ops.GroupedLinear(2, 64, 32, device="cpu")
    assert [name for name, _ in operation.named_parameters()] == [
        "weight0",
        "weight1",
        "bias0",
        "bias1",
    ]
    for i in range(2):
        assert 0.9 < getattr(operation, f"weight{i}").abs().max().item() * 8 <= 1
        assert not getattr(operation, f"bias{i}").any()


def test_refusals() -> None:
    operation = ops.GroupedLinear(2, 16, 16, device="cpu")
    with pytest.raises(ValueError, match=r"\[GroupedLinear\] expected m_splits to be 2 numbers"):
        operation(torch.ones(4, 16), [4])
    with pytest.raises(ValueError, match="expected num_gemms >= 1"):
        ops.GroupedLinear(0, 16, 16, device="cpu")
    with pytest.raises(ValueError, match="expected 1 extra inputs, got 0"):
        ops.Sequential(operation)(torch.ones(4, 16))
