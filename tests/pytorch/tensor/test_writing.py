"""Weights that are written together, and slices of weights, which share their codes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.optimizers import parts
from transformer_engine.pytorch.tensor.writing import write

RECIPES = pytest.mark.parametrize("recipe", [DelayedScaling(), Float8BlockScaling()])


@RECIPES
def test_an_error_leaves_whole_weights(recipe, device: str) -> None:
    """All weights keep their old codes and scales."""
    with te.fp8_model_init(recipe=recipe):
        weights = [te.Linear(32, 32, device=device).weight for _ in range(3)]
    before = [weight.dequantize() for weight in weights]
    values = 100 * torch.randn(32, 32, device=device)
    with pytest.raises(ValueError, match="expected values of shape"):
        write(weights, [values, values[1:], values])
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight.dequantize(), old)


@RECIPES
def test_weights_may_swap_values(recipe, device: str) -> None:
    with te.fp8_model_init(recipe=recipe):
        weights = [te.Linear(32, 32, device=device).weight for _ in range(2)]
    before = [weight.dequantize() for weight in weights]
    write(weights, weights[::-1])
    for weight, other in zip(weights, before[::-1], strict=True):
        torch.testing.assert_close(weight.dequantize(), other, rtol=0.07, atol=0.01)


def test_written_together_as_alone(device: str) -> None:
    """Weights of several sizes, values of several dtypes."""
    sizes = [(32, 32), (64, 16), (16, 48)]
    values = [torch.randn(size, device=device) for size in sizes]
    values[1] = values[1].bfloat16()
    found = []
    for together in (True, False):
        with te.fp8_model_init():
            layers = [te.Linear(n, m, bias=False, device=device) for m, n in sizes]
        weights = [layer.weight for layer in layers]
        versions = [weight._data._version for weight in weights]
        if together:
            write(weights, values)
        else:
            for weight, value in zip(weights, values, strict=True):
                write([weight], [value])
        pairs = zip(weights, versions, strict=True)
        assert all(weight._data._version > version for weight, version in pairs)
        found.append([weight.dequantize() for weight in weights])
    for ours, theirs, value in zip(*found, values, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, value.to(ours.dtype), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("shape", [(2,), (1,), ()])
def test_scales_that_users_bring_are_copied(shape: tuple[int, ...], device: str) -> None:
    """The source or the target may have 1/scale without the scale."""
    with te.fp8_model_init():
        layers = [te.Linear(32, 32, device=device) for _ in "ab"]
    source, weight = layers[0].weight.detach(), layers[1].weight
    scale = source._scale_inv[: torch.Size(shape).numel()].reshape(shape).clone()
    own = source.with_parts([source._data.clone(), scale])
    layers[1].load_state_dict({**layers[1].state_dict(), "weight": own})
    weight.detach().copy_(own)
    assert torch.equal(weight.dequantize(), source.dequantize())
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(weight.dequantize(), 2 * source.dequantize())
    own.detach().copy_(weight.detach())
    assert torch.equal(own.dequantize(), weight.dequantize())


SLICES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda w: w[16:32],
    "narrow": lambda w: w.narrow(-2, 3, 7),
    "row": lambda w: w[-5],
    "one of the rows": lambda w: list(w)[1],
    "rows of rows": lambda w: w[8:40][3:9],
    "rows of a view": lambda w: w.view(-1, 16)[5:9],
    "chunk": lambda w: w.chunk(3)[1],
    "rows of a chunk": lambda w: w.chunk(2)[1][5:9],
    "the only chunk": lambda w: w.chunk(1)[0],
    "more than all rows": lambda w: w.split(99)[0],
    "split": lambda w: torch.split(w, [8, 40])[1],
    "flat": lambda w: w.view(-1)[33:1001],
    "flat as a matrix": lambda w: w.reshape(-1)[32:1056].view(32, 32),
    "chunk of flat": lambda w: w.flatten().chunk(5)[4],
    "one value": lambda w: w.view(-1)[77],
    "none": lambda w: w[16:16],
}


def a_weight(device: str, **options: Any) -> Any:
    torch.manual_seed(5)
    with te.fp8_model_init(recipe=options.pop("recipe", DelayedScaling())):
        return te.Linear(64, 48, bias=False, device=device, **options).weight


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_write_to_the_weight(name: str, dtype: torch.dtype, device: str) -> None:
    weight, cut = a_weight(device, params_dtype=dtype), SLICES[name]
    weight.transposed_codes()
    expected = weight.detach().dequantize().clone()
    piece = cut(weight.detach())
    assert type(piece) is te.Float8Tensor
    assert_bitwise(piece.dequantize(), cut(expected))
    with torch.no_grad():
        for change in (torch.Tensor.neg_, lambda x: x.mul_(0.5), lambda x: x.mul_(16)):
            change(cut(weight))
            change(cut(expected))
            torch.testing.assert_close(weight.dequantize(), expected, rtol=0.07, atol=1e-3)
        assert_bitwise(cut(weight).dequantize(), piece.dequantize())
        assert torch.equal(weight.transposed_codes(), weight._data.t())
        piece.zero_()
        cut(expected).zero_()
    assert_bitwise(cut(weight).dequantize().detach(), cut(expected))


def test_other_values_survive_those_beyond_the_scale(device: str) -> None:
    weight = a_weight(device)
    before, scale = weight.dequantize().detach(), weight.scales[1].item()
    large, small = weight.detach()[:4], weight.detach()[4:].view(-1)[:-10]
    for factor in (1000.0, 1e-3):
        values = factor * before[:4]
        large.copy_(values)
        torch.testing.assert_close(large.dequantize(), values, rtol=0.07, atol=0.02 * factor)
        ratio = scale / weight.scales[1].item()
        assert torch.frexp(torch.tensor(ratio))[0] == 0.5, "a power of two"
        assert (ratio > 500) == (factor > 1)
        assert torch.equal(weight.scales.prod().round(), torch.ones_like(weight.scales[0]))
        torch.testing.assert_close(small.dequantize(), before[4:].view(-1)[:-10], rtol=0, atol=0.02)
    assert weight.scales[1].item() == pytest.approx(scale)
    large.copy_(before[:4])
    scale = weight.scales.clone()
    for _ in range(5):  # the scale stays the same
        large.mul_(1)
    assert torch.equal(weight.scales, scale)


def test_rows_of_zeros_get_a_scale_of_their_own(device: str) -> None:
    weight = a_weight(device, init_method=torch.nn.init.zeros_)
    values = 1e-3 * torch.randn(48, 64, device=device)
    for row, value in zip(weight.detach(), values, strict=True):
        row.copy_(value)
    torch.testing.assert_close(weight.dequantize().detach(), values, rtol=0.07, atol=1e-5)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()])
def test_a_slice_of_all_values_is_written_as_the_weight(recipe, device: str) -> None:
    weights = [a_weight(device, recipe=recipe).detach() for _ in range(2)]
    values = torch.randn(48, 64, device=device)
    weights[0].copy_(values)
    weights[1].view(-1)[:].copy_(values.view(-1))
    for ours, theirs in zip(*(weight.parts for weight in weights), strict=True):
        assert torch.equal(ours, theirs)


def test_copies_of_slices_are_tensors_of_their_own(device: str) -> None:
    weight = a_weight(device)
    before = weight.dequantize().detach()
    piece = torch.nn.Parameter(weight.detach()[8:24])
    other = a_weight(device)
    other.data = torch.cat([piece.detach().float()] * 3)
    twins = [piece.clone(), copy.deepcopy(piece), other.detach()[:16].clone()]
    twins.append(copy.deepcopy(weight.detach().chunk(3)[0]))
    for twin in twins:
        with torch.no_grad():
            twin.mul_(1000)
        assert_bitwise(weight.dequantize().detach(), before)
    own = te.Float8Tensor(
        piece.shape, piece.dtype, *twins[1].parts, 5, quantizer=twins[1]._quantizer
    )
    own.data = piece.detach()
    own.zero_()
    assert_bitwise(weight.dequantize().detach(), before)
    piece.data.copy_(own)
    assert not weight[8:24].any()
    assert_bitwise(weight.dequantize().detach()[24:], before[24:])


def test_a_flag_keeps_the_weight_of_a_slice(device: str) -> None:
    weight = a_weight(device).detach()
    before = [part.clone() for part in weight.parts]
    piece = weight[3:9]
    values = 100 * torch.randn(6, 64, device=device)
    flag = torch.ones(1, device=device)
    piece.quantize_(values, noop_flag=flag)
    for part, old in zip(weight.parts, before, strict=True):
        assert torch.equal(part, old)
    piece.quantize_(values, noop_flag=flag.zero_())
    torch.testing.assert_close(weight.dequantize()[3:9], values, rtol=0.07, atol=0.2)


def test_values_of_slices_as_numbers(device: str) -> None:
    weight = a_weight(device).detach()
    values = weight.dequantize()
    assert weight[3].tolist() == values[3].tolist()
    one, expected = weight.view(-1)[77], values.view(-1)[77]
    assert f"{one:.3f}" == f"{expected:.3f}" and float(one) == expected.item()
    assert f"{weight[3]}" == str(weight[3])


def test_writes_to_views_renew_transposed_codes(device: str) -> None:
    weight = a_weight(device).detach()
    view = weight.view(2, 24, 64)
    assert torch.equal(weight.transposed_codes(), weight._data.t())
    view.detach().neg_()
    assert torch.equal(weight.transposed_codes(), weight._data.t())
    rows = view.view(48, 64)[8:16]
    assert torch.equal(rows.transposed_codes(), rows._data.t())
    weight.mul_(-3)
    assert torch.equal(rows.transposed_codes(), weight._data[8:16].t())


def test_gradients_of_slices(device: str) -> None:
    weight = a_weight(device)
    plain = weight.dequantize().detach().requires_grad_()
    x = torch.randn(5, 64, device=device)
    for w in (weight, plain):
        (x @ w[8:24].t()).square().sum().backward()
        (w[3] * w.view(-1)[100:164]).sum().backward()
    torch.testing.assert_close(weight.grad, plain.grad)


@pytest.mark.filterwarnings("ignore:.*whole blocks")
def test_other_slices_are_values(device: str) -> None:
    weight, blocks = a_weight(device), a_weight(device, recipe=Float8BlockScaling())
    with torch.no_grad():
        for piece in (weight[:, 2:4], weight[::2], weight.t()[3], blocks[2:4], blocks[0]):
            assert type(piece) is torch.Tensor


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 traces no tensors in FP8")
@pytest.mark.parametrize("cut", ["w[:16]", "w[16:]", "w[3]", "w.view(-1)[32:64]"])
def test_slices_are_read_in_compiled_code(cut: str, device: str) -> None:
    torch._dynamo.reset()
    part = eval(cut, {"w": a_weight(device).detach()})
    compiled = torch.compile(lambda w: torch.sum(w, -1), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(part), part.dequantize().sum(-1))


def test_slices_that_are_saved_share_nothing_afterwards(device: str) -> None:
    weight = a_weight(device).detach()
    loaded, part = pickle.loads(pickle.dumps([weight, weight[:16]]))
    assert_bitwise(part.dequantize(), weight[:16].dequantize())
    part.mul_(100)
    assert_bitwise(loaded.dequantize(), weight.dequantize())


def test_infinities_in_a_slice_leave_other_values(device: str) -> None:
    weight = a_weight(device).detach()
    before = weight.dequantize()[16:].clone()
    weight[:16].fill_(float("inf"))
    assert_bitwise(weight.dequantize()[16:], before)


def test_infinities_in_a_slice_leave_its_finite_values(device: str) -> None:
    weight = a_weight(device).detach()
    values = 1000 * torch.randn(16, 64, device=device)
    values[3, 5] = float("inf")
    weight[:16].copy_(values)
    finite = values.isfinite()
    found = weight.dequantize()[:16]
    torch.testing.assert_close(found[finite], values[finite], rtol=0.07, atol=1)
    assert found[3, 5] >= found[finite].max()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.0, 1e-37),
        (0.0, 1e-44),
        (1e-38, 1e-38),
        (1e-30, 1e30),
        (1e30, 1e-30),
        (1.0, 3.4e38),
        (3e38, 1e-36),
        (1e-36, 3e38),
    ],
)
def test_slices_move_the_scale_through_the_range_of_fp32(
    before: float, after: float, device: str
) -> None:
    weight = a_weight(device).detach()
    weight.fill_(before)
    parts = weight.chunk(3)
    for i, part in enumerate(parts):
        part.fill_(after)
        larger = after if i == 2 else max(before, after)
        wanted = torch.full_like(part, after if after == larger else 0.0, dtype=torch.float32)
        torch.testing.assert_close(part.dequantize(), wanted, rtol=0.07, atol=1e-40)
        assert weight.dequantize().isfinite().all()
        assert weight.scales.isfinite().all() and (weight.scales > 0).all()


def test_optimizers_step_slices_of_zeros_by_little(device: str) -> None:
    weight = a_weight(device, init_method=torch.nn.init.zeros_).detach()
    part = torch.nn.Parameter(weight.view(-1)[:1000])
    part.grad = torch.full_like(part, 1e-9)
    torch.optim.SGD([part], lr=1e-30).step()
    assert weight.dequantize().abs().max() < 1e-38


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("cut", ["w[:16]", "w.view(-1)"])
def test_fused_optimizers_step_no_slices_beside_other_processes(
    name: str, cut: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = a_weight(device)
    part = torch.nn.Parameter(eval(cut, {"w": weight.detach()}))
    part.grad, weight.grad = torch.ones_like(part), torch.ones_like(weight)
    options: dict[str, Any] = {"master_weights": True} if name == "FusedAdam" else {}
    one, other = (getattr(te.optimizers, name)([x], lr=1e-2, **options) for x in (part, weight))
    monkeypatch.setattr(parts, "group_or_world_size", lambda group: 2)
    with pytest.raises(NotImplementedError, match=rf"\[{name}\] expected FP8 weights as a whole"):
        one.step()
    other.step()


def test_a_view_that_takes_other_values_over_knows_when_they_are_written(device: str) -> None:
    view, other = (a_weight(device).detach() for _ in range(2))
    view = view.view(view.shape)
    view.data = other
    view.transposed_codes()
    other.copy_(torch.randn(other.shape, device=device))
    assert_bitwise(view.transposed_codes(), other._data.t())


def test_views_of_pieces_wait_for_the_ranks_as_pieces_do(device: str) -> None:
    weight = a_weight(device).detach()
    piece = weight.split(16)[0]
    room = weight.new_zeros(piece.shape).copy_(piece)
    for part in (room, room.view(-1)):
        with pytest.raises(RuntimeError, match="expected the first forward or load_state_dict"):
            part.mul_(2)
