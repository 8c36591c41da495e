"""Packed batches of token ids for context parallel ranks: padding, positions, each rank's part."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
)

LENGTHS = [3, 8, 0, 5]
PADDED = [4, 8, 0, 8]


def ends_of(lengths, dtype, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def padded_by_definition(values, pad):
    found, values = [], list(values)
    for length, room in zip(LENGTHS, PADDED, strict=True):
        found += values[:length] + [pad] * (room - length)
        values = values[length:]
    return found


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sequences_are_padded(device, dtype, batch):
    ids, labels = torch.arange(16, device=device), torch.arange(16, 32, device=device)
    shape = (1, 16) if batch else (16,)
    ends = ends_of(LENGTHS, dtype, device)
    pad = partial(pad_thd_sequences_for_cp, ids.view(shape), labels.view(shape), ends, 4)
    for more, pads in (({}, (0, -100)), ({"padding_token_id": 7, "padding_label_id": 9}, (7, 9))):
        got_ids, got_labels, got_ends = pad(**more)
        assert got_ids.tolist() == padded_by_definition(ids.tolist(), pads[0])
        assert got_labels.tolist() == padded_by_definition(labels.tolist(), pads[1])
        assert torch.equal(got_ends, ends_of(PADDED, dtype, device))
        assert got_ends.dtype is dtype


def test_positions_go_on_in_the_padding(device):
    ends = ends_of(LENGTHS, torch.int32, device)
    expected = [position for length in PADDED for position in range(length)]
    for dtype in (torch.int64, torch.int32):
        got = generate_positional_ids_for_cp(ends, 4, dtype=dtype)
        assert got.dtype is dtype and got.device == ends.device
        assert got.tolist() == expected


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_ranks(rank, named):
    """The sequences are `[0, 8)` and `[8, 12)`, in chunks of two tokens and of one token."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        ids, ends = torch.arange(12), ends_of([8, 4], torch.int32)
        group = dist.group.WORLD if named else None
        found = get_batch_on_this_cp_rank(ends, ids[None], ids[None] + 12, ids, group)
        with pytest.raises(ValueError, match="lengths divisible by 4"):
            get_batch_on_this_cp_rank(ends_of([6, 6], torch.int32), ids, ids, ids)
    finally:
        dist.destroy_process_group()
    expected = torch.tensor([[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]][rank])
    for got, right in zip(found, (expected[None], expected[None] + 12, expected), strict=True):
        assert torch.equal(got, right)


def test_refusals():
    ids, ends = torch.arange(16), ends_of(LENGTHS, torch.int32)
    with pytest.raises(ValueError, match=r"input_ids of shape \(16,\) or \(1, 16\), .* \(2, 8\)"):
        pad_thd_sequences_for_cp(ids.view(2, 8), ids, ends, 4)
    with pytest.raises(ValueError, match=r"labels of shape \(16,\) .* got \(15,\)"):
        pad_thd_sequences_for_cp(ids, ids[1:], ends, 4)
    with pytest.raises(ValueError, match="divisibility_factor >= 1, got 0"):
        generate_positional_ids_for_cp(ends, 0)
    with pytest.raises(ValueError, match=r"cu_seqlens to rise from 0, got \[0, 4, 2\]"):
        generate_positional_ids_for_cp(torch.tensor([0, 4, 2]), 4)
    with pytest.raises(ValueError, match="expected qvk_format='thd', got 'bshd'"):
        get_batch_on_this_cp_rank(ends, ids, ids, ids, qvk_format="bshd")
    with pytest.raises(TypeError, match="labels_padded"):
        get_batch_on_this_cp_rank(ends, ids, None, ids)
    for call in (
        lambda ends: pad_thd_sequences_for_cp(ids, ids, ends, 4),
        lambda ends: generate_positional_ids_for_cp(ends, 4),
        lambda ends: get_batch_on_this_cp_rank(ends, ids, ids, ids),
    ):
        with pytest.raises(
            TypeError, match=r"expected cu_seqlens.* of torch.int32 or torch.int64, got .*float"
        ):
            call(ends.float())
        with pytest.raises(ValueError, match=r"cu_seqlens.* of shape \(batch \+ 1,\), got \(\)"):
            call(ends[0])
    one = torch.tensor(1)
    with pytest.raises(ValueError, match=r"input_ids of shape \(1,\) or \(1, 1\), .* got \(\)"):
        pad_thd_sequences_for_cp(one, one, torch.tensor([0, 1]), 4)
    with pytest.raises(ValueError, match=r"labels_padded of shape .*, got \(\)"):
        get_batch_on_this_cp_rank(ends_of([16], torch.int32), ids, one, ids)
