"""Pieces of FP8 weights, which these tests make and gather with the calls of `fully_shard`."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.tensor.shards import initial_value


def _weight(rows: int, recipe: Recipe, preserve: bool = False) -> Any:
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return te.Linear(256, rows, bias=False, params_dtype=torch.bfloat16, device="cpu").weight


@torch.no_grad()
def _pieces(weight: torch.Tensor, ranks: int) -> list[Any]:
    """Each piece is in memory of the size of the first one, which is the largest."""
    found = []
    for rank in range(ranks):
        chunks = weight.chunk(ranks)
        room = weight.new_zeros(chunks[0].shape)
        length = len(chunks[rank]) if rank < len(chunks) else 0
        if length:
            room.narrow(0, 0, length).copy_(chunks[rank])
        found.append(room.narrow(0, 0, length))
    return found


def _gathered(pieces: list[Any], weight: torch.Tensor, out: Any = None) -> Any:
    mesh = SimpleNamespace(get_group=lambda: None, size=lambda: len(pieces))
    made = [piece.fsdp_pre_all_gather(mesh, weight.shape, None, None, None) for piece in pieces]
    joined = [torch.cat(parts) for parts in zip(*(parts for parts, _ in made), strict=True)]
    found = pieces[0].fsdp_post_all_gather(joined, made[0][1], torch.float16, out=out)
    return out if found is None else found[0]


@pytest.mark.parametrize(
    ("rows", "ranks", "recipe"),
    [
        (64, 2, Float8CurrentScaling()),
        (80, 3, Float8CurrentScaling()),  # 27, 27 and 26 rows
        (16, 12, Float8CurrentScaling()),  # the last ranks have no rows
        (512, 2, Float8BlockScaling()),
        (256, 2, Float8BlockScaling()),
    ],
)
def test_pieces_make_up_the_weight(rows: int, ranks: int, recipe: Recipe) -> None:
    weight = _weight(rows, recipe)
    pieces = _pieces(weight, ranks)
    assert sum(len(piece) for piece in pieces) == rows
    assert all(type(piece) is type(weight) for piece in pieces)
    whole = _gathered(pieces, weight)
    assert type(whole) is type(weight)
    if isinstance(recipe, Float8CurrentScaling):  # each rank has all scales
        assert all(torch.equal(piece.scales, weight.scales) for piece in pieces)
    assert whole.dtype is torch.float16  # the dtype of the mixed precision policy
    assert torch.equal(
        whole.dequantize(dtype=torch.float32), weight.dequantize(dtype=torch.float32)
    )


def test_a_weight_gathered_again_has_its_new_values() -> None:
    weight = _weight(64, Float8CurrentScaling())
    whole = _gathered(_pieces(weight, 2), weight)
    whole.transposed_codes()
    other = _weight(64, Float8CurrentScaling())
    _gathered(_pieces(other, 2), other, out=whole)
    assert torch.equal(whole.dequantize(dtype=torch.float32), other.dequantize(dtype=torch.float32))
    assert torch.equal(whole.transposed_codes(), whole._data.t())


def test_room_for_a_piece_is_made_once() -> None:
    """Other calls of `new_zeros` return plain tensors, in which optimizers keep their states."""
    weight = _weight(64, Float8CurrentScaling())
    assert type(weight.new_zeros(64, 256)) is torch.Tensor
    _pieces(weight, 2)
    assert type(weight.new_zeros(32, 256)) is torch.Tensor


def test_weights_that_users_cut_give_plain_zeros_and_free_their_codes() -> None:
    weight = _weight(64, Float8CurrentScaling())
    codes = weakref.ref(weight._data)
    first, *_ = weight.split(16)
    del first, _
    assert type(weight.new_zeros(16, 256)) is torch.Tensor
    _ = weight.split(16)
    weight.data = _weight(64, Float8CurrentScaling()).data
    del _
    assert codes() is None


@pytest.mark.parametrize("rank", [0, 2])  # they have 27 and 26 rows, in memory for 27
def test_slices_of_what_fully_shard_keeps_are_read_alone(rank: int) -> None:
    """To write one, all ranks would have to find its scale together."""
    piece = _pieces(_weight(80, Float8CurrentScaling()), 3)[rank]
    cuts = {
        "first rows": lambda x: x[:4],
        "rows": lambda x: x[4:8],
        "row": lambda x: x[0],
        "chunk": lambda x: x.chunk(2)[0],
        "split": lambda x: x.split([10, len(x) - 10])[1],
        "flat": lambda x: x.view(-1)[:64],
    }
    before = piece.dequantize()
    for name, cut in cuts.items():
        part = cut(piece)
        assert type(part) is te.Float8Tensor, name
        assert_bitwise(part.dequantize(), cut(before))
        with pytest.raises(RuntimeError, match=r"written as a whole, got a slice of \d+ of its"):
            part.mul_(0.25)
    assert_bitwise(piece.dequantize(), before)


def test_a_piece_that_fully_shard_cuts_again_is_written_as_a_whole() -> None:
    """It does so after a piece was replaced, for example by `load_state_dict(assign=True)`."""
    piece = _pieces(_weight(80, Float8CurrentScaling()), 3)[2]
    room = piece.new_zeros(27, 256)
    room.narrow(0, 0, 26).copy_(piece)
    again = room.narrow(0, 0, 26)
    assert_bitwise(again.dequantize(), piece.dequantize())
    for part in (again, again[:], again.view(-1), again.chunk(1)[0]):
        with pytest.raises(RuntimeError, match="expected the first forward or load_state_dict"):
            part.mul_(2)


def test_a_weight_that_was_cut_may_change_its_dtype() -> None:
    with te.quantized_model_init():
        layer = te.Linear(32, 32, device="cpu")
    layer.weight.chunk(2)
    assert layer.half().weight.dtype is torch.float16


def test_pieces_keep_what_the_weight_started_with() -> None:

    weight = _weight(64, Float8CurrentScaling(), preserve=True)
    start = weight.get_high_precision_init_val()
    found = [initial_value(piece).get() for piece in _pieces(weight, 2)]
    assert torch.equal(torch.cat(found), start)


def test_pieces_that_cut_blocks_are_plain_with_a_warning() -> None:
    weight = _weight(128, Float8BlockScaling())
    with pytest.warns(UserWarning, match="got 64 of 128 rows"), torch.no_grad():
        assert all(type(piece) is torch.Tensor for piece in weight.chunk(2))


RECIPES = pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()])


@RECIPES
def test_weights_that_took_over_pieces_are_written_alone(recipe: Recipe) -> None:
    whole = _weight(384, recipe)
    weights = [_weight(128, recipe) for _ in range(3)]
    expected = whole.dequantize().detach()
    for weight, piece in zip(weights, whole.data.chunk(3), strict=True):
        weight.data = piece
    with torch.no_grad():
        weights[1].mul_(4)
    for i, rows in enumerate(expected.chunk(3)):
        if i == 1:
            torch.testing.assert_close(weights[1].dequantize(), 4 * rows, rtol=0.07, atol=1e-3)
        else:
            assert_bitwise(weights[i].dequantize().detach(), rows)
    if isinstance(recipe, Float8CurrentScaling):  # in blocks, `weights` share the codes of `whole`
        assert_bitwise(whole.dequantize().detach(), expected)


@RECIPES
def test_copies_of_pieces_are_weights_of_their_own(recipe: Recipe) -> None:
    whole = _weight(256, recipe)
    expected = whole.dequantize().detach()
    piece = whole.detach().chunk(2)[1]
    for copy in (piece.clone(), torch.nn.Parameter(piece.clone())):
        assert_bitwise(copy.dequantize().detach(), expected[128:])
        copy.grad = torch.ones_like(copy)
        torch.optim.SGD([copy], lr=0.25).step()
        wanted = expected[128:] - 0.25
        torch.testing.assert_close(copy.dequantize().detach(), wanted, rtol=0.07, atol=1e-3)
    assert_bitwise(whole.dequantize().detach(), expected)


def test_a_piece_takes_no_scale_but_that_of_all_pieces() -> None:
    whole = _weight(64, Float8CurrentScaling())
    piece, *_ = _pieces(whole, 2)
    copy = piece.clone()
    copy.mul_(4)
    with pytest.raises(RuntimeError, match=r"fully_shard.*clone\(\) of it has a scale of its own"):
        piece.copy_(copy)
