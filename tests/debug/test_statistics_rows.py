"""Rows of statistics: merging over ranks and calls, and reading values from them."""

import math

import pytest
import torch
from statistics_reference import assert_statistics, reference

from transformer_engine.debug.statistics.rows import Kind, empty_row, merge_ranks, read
from transformer_engine.pytorch.kernels.moments import moments

PARTS = {
    "unequal": (torch.randn(1000) + 100, torch.randn(3) * 50, torch.randn(1)),
    "with an empty rank": (torch.empty(0), torch.randn(64), torch.empty(0)),
    "far means": (torch.randn(512) + 1000, torch.randn(512) - 1000),
    "zeros": (torch.zeros(5), torch.zeros(7)),
}


def _row(x: torch.Tensor) -> torch.Tensor:
    row = torch.tensor(empty_row(Kind.MOMENTS), dtype=torch.float64)
    moments(x, row)
    return row


@pytest.mark.parametrize("case", PARTS)
def test_ranks_merge_as_one_tensor(case: str) -> None:
    parts = PARTS[case]
    rows = torch.stack([_row(part) for part in parts])[:, None]
    merged = merge_ranks(rows, torch.tensor([Kind.MOMENTS]))[0].tolist()
    assert_statistics(read(Kind.MOMENTS, merged), reference(*parts))


def test_merging_nothing_leaves_rows_empty() -> None:
    kinds = torch.tensor(list(Kind))
    rows = torch.tensor([empty_row(kind) for kind in Kind], dtype=torch.float64)
    assert merge_ranks(torch.stack([rows, rows, rows]), kinds).equal(rows)


def test_nan_of_one_rank_shows() -> None:
    rows = torch.stack([_row(torch.ones(4)), _row(torch.tensor([math.nan]))])[:, None]
    found = read(Kind.MOMENTS, merge_ranks(rows, torch.tensor([0]))[0].tolist())
    assert all(math.isnan(found[name]) for name in ("min", "max", "mean", "std", "cur_amax"))


def test_casts_merge() -> None:
    empty = torch.tensor(empty_row(Kind.CASTS), dtype=torch.float64)
    a, b = empty.clone(), empty.clone()
    a[:6] = torch.tensor([10.0, 1.0, 2.0, 0.5, 0.25, 0.25])
    b[:6] = torch.tensor([30.0, 3.0, 0.0, 0.3, 0.5, 0.5])
    merged = merge_ranks(torch.stack([a, empty, b])[:, None], torch.tensor([Kind.CASTS]))[0]
    assert read(Kind.CASTS, merged.tolist()) == {
        "underflows%": 10.0,
        "overflows%": 5.0,
        "mse": pytest.approx(0.02),
        "scale_inv_min": 0.25,
        "scale_inv_max": 0.5,
    }


def test_blocks_merge_by_maximum() -> None:
    rows = torch.zeros(2, 1, 16, dtype=torch.float64)
    rows[:, 0, :2] = torch.tensor([[4.0, 7.0], [2.0, 5.0]])
    merged = merge_ranks(rows, torch.tensor([Kind.BLOCKS]))[0]
    assert merged[:2].tolist() == [6.0, 7.0]


def test_weights_of_a_replayed_graph_count_once() -> None:
    x = torch.randn(128) + 3
    row = torch.tensor(empty_row(Kind.MOMENTS), dtype=torch.float64)
    for _ in range(4):
        moments(x, row)
    assert_statistics(read(Kind.MOMENTS, row.tolist(), 128), reference(x))
