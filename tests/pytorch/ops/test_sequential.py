"""`Sequential`: extra inputs and outputs, the methods of a list, and compiled code."""

import warnings
from collections import OrderedDict

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import ops


class Two(ops.FusibleOperation):
    """Has two extra inputs and two extra outputs."""

    num_extra_inputs = num_extra_outputs = 2

    def forward(self, x, a, b):
        return x + a, b, x


@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_leave_and_join_in_order(in_place: bool, device: str) -> None:
    sequence = ops.Sequential(
        ops.MakeExtraOutput(in_place=in_place),
        nn.Softplus(),
        ops.AddExtraInput(in_place=in_place),
        ops.ConstantScale(3.0),
        Two(),
        ops.MakeExtraOutput(),
    )
    assert (sequence.num_extra_inputs, sequence.num_extra_outputs) == (3, 4)
    x, a, b, c = leaves = [torch.randn(4, 8, device=device, requires_grad=True) for _ in range(4)]
    out, *extra = sequence(x, a * 1, b, c)
    after = 3 * (nn.functional.softplus(x) + a)
    expected = [after + b, x, c, after, after + b]
    for one, other in zip([out, *extra], expected, strict=True):
        torch.testing.assert_close(one, other)
    upstream = [torch.randn_like(x) for _ in expected]
    found = torch.autograd.grad([out, *extra], leaves, upstream)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(one, other)


def test_a_sum_in_place_is_in_the_memory_of_the_extra_input(device: str) -> None:
    x, extra = torch.ones(2, 4, device=device), torch.ones(2, 4, device=device)
    assert ops.AddExtraInput(in_place=True)(x, extra) is extra and extra.sum() == 16
    extra = torch.ones(2, 4, device=device, dtype=torch.bfloat16)
    assert ops.AddExtraInput()(x, extra).dtype is torch.float32 and extra.sum() == 8


def test_a_residual_from_one_sequence_to_another(device: str) -> None:
    """A sequence returns the residual, and the next one adds it; in FP8."""
    first = ops.Sequential(
        ops.LayerNorm(32, device=device),
        ops.MakeExtraOutput(),
        ops.Linear(32, 128, device=device),
        ops.SwiGLU(),
    )
    second = ops.Sequential(ops.Linear(64, 32, device=device), ops.AddExtraInput())
    x = torch.randn(16, 32, device=device, requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        y, residual = first(x)
        out = second(y, residual)
        norm, _, up, act = first
        plain = norm(x)
        expected = second[0](act(up(plain))) + plain
    assert_bitwise(out, expected)
    (found,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0])


def test_sequences_in_sequences(device: str) -> None:
    inner = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput())
    outer = ops.Sequential(ops.ConstantScale(2.0), inner, ops.AddExtraInput())
    x = torch.ones(2, device=device)
    out, middle = outer(x, x, 4 * x)
    assert torch.equal(out, 7 * x) and torch.equal(middle, 3 * x)


def test_the_list() -> None:
    sequence = ops.Sequential(ops.ConstantScale(2.0))
    sequence.append(ops.GELU())
    sequence.insert(0, nn.Identity())
    sequence.extend([ops.AddExtraInput(), ops.Linear(4, 4, device="cpu")])
    assert [type(module).__name__ for module in sequence] == [
        "Identity",
        "ConstantScale",
        "GELU",
        "AddExtraInput",
        "Linear",
    ]
    assert [*sequence.state_dict()] == ["4.weight", "4.bias", "4._extra_state"]
    part = sequence[1:3]
    assert isinstance(part, ops.Sequential) and part.num_extra_inputs == 0
    x = torch.randn(2, 4)
    assert_bitwise(part(x), ops.GELU()(2 * x))
    assert sequence[-1] is sequence.pop(-1) and len(sequence) == 4
    del sequence[0]
    sequence[0] = ops.ConstantScale(0.0)
    assert_bitwise(sequence(x, x), x)
    assert ops.Sequential()(x) is x


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_operations_by_name(kind: type[dict]) -> None:
    sequence = ops.Sequential(kind(twice=ops.ConstantScale(2.0), act=ops.GELU()))
    assert [name for name, _ in sequence.named_children()] == ["twice", "act"]
    x = torch.randn(2, 4)
    assert_bitwise(sequence(x), ops.GELU()(2 * x))
    assert [name for name, _ in sequence[1:].named_children()] == ["act"]


@pytest.mark.parametrize("count", [0, 2])
def test_wrong_numbers_of_extra_inputs(count: int) -> None:
    sequence = ops.Sequential(ops.GELU(), ops.AddExtraInput())
    x = torch.ones(2)
    with pytest.raises(ValueError, match=rf"expected 1 extra inputs, got {count}: 1 \(AddExtra"):
        sequence(x, *[x] * count)
    with pytest.raises(ValueError, match="got 1: no operation takes any"):
        sequence[:1](x, x)


@pytest.mark.parametrize(
    ("extra", "in_place", "error", "text"),
    [
        (None, False, TypeError, "expected extra to be a torch.Tensor, got NoneType"),
        (torch.ones(3), False, ValueError, r"expected extra of shape \(2,\), as x, got \(3,\)"),
        (torch.ones(2, requires_grad=True), True, ValueError, "got a leaf that requires grad"),
    ],
)
def test_extra_inputs_that_are_refused(extra, in_place, error, text) -> None:
    with pytest.raises(error, match=text):
        ops.AddExtraInput(in_place=in_place)(torch.ones(2), extra)


@pytest.mark.parametrize("fp8", [False, True])
def test_compiled(fp8: bool) -> None:
    """The sequence compiles to one graph, with the results and gradients of eager code."""
    sequence = ops.Sequential(
        ops.LayerNorm(32, device="cpu"),
        ops.Identity(),
        ops.MakeExtraOutput(),
        ops.Linear(32, 64, device="cpu"),
        ops.GLU(),
        ops.ConstantScale(0.5),
        ops.Dropout(0.0),
        ops.L2Normalization(),
        ops.AddExtraInput(),
        nn.Tanh(),
        ops.Reshape((4, 4, 32)),
        ops.BasicLinear(32, 64, device="cpu"),
        ops.Bias(64, device="cpu"),
        ops.ScaledSwiGLU(),
    )
    if not fp8:  # the casts of `Quantize` break the graph
        sequence.append(ops.Quantize(backward=True))
    inputs = [torch.randn(16, 32), torch.randn(16, 32), torch.rand(4, 4)]

    def run(model):
        own = [x.clone().requires_grad_() for x in inputs]
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            results = model(*own)
        sum(result.float().sum() for result in results).backward()
        grads = [x.grad for x in (*own, *sequence.parameters())]
        sequence.zero_grad()
        return [*results, *grads]

    expected = run(sequence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(torch.compile(sequence, backend="aot_eager", fullgraph=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
