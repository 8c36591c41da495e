"""Attention of ranks that share sequences is that of whole sequences.

Bounds are on the norm of an error over that of the exact result. fp32: sums in another order. 16
bit: three roundings, of the result of a part, of scores in products of 16 bit, and of the merged
result or the summed gradient, each of at most half a unit in the last place.
"""

from itertools import product

import pytest
import torch
from context_cases import Case, outcomes
from ranks import run_ranks

BOUND = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
TWO = [
    *[
        Case(comm, mask, qkv_format, groups=groups, dtype=dtype)
        for comm, mask, qkv_format, (groups, dtype) in product(
            ("p2p", "all_gather", "a2a"),
            ("causal", "no_mask"),
            ("bshd", "sbhd"),
            ((4, torch.float32), (2, torch.bfloat16), (2, torch.float16)),
        )
    ],
    *[
        Case(comm, mask, "thd", groups=2, room=room)
        for comm, mask, room in product(
            ("p2p", "all_gather", "a2a"), ("padding", "padding_causal"), (False, True)
        )
    ],
    *[
        case
        for comm in ("p2p", "all_gather", "a2a")
        for case in (
            Case(comm, "padding", "thd", groups=2, room=True, dtype=torch.bfloat16),
            Case(comm, "padding_causal"),
            Case(comm, "padding_causal_bottom_right", "sbhd"),
            Case(comm, "padding", "sbhd", keys=24),
            Case(comm, "arbitrary", groups=2),
            Case(comm, "causal", window=(3, 0)),
            Case(comm, "no_mask", "sbhd", window=(2, 3)),
            Case(comm, "causal_bottom_right", keys=24),
            Case(comm, "causal", keys=24),
            Case(comm, bias="post_scale_bias"),
            Case(comm, "no_mask", bias="pre_scale_bias", bias_shape=(1, 1)),
            Case(comm, bias="post_scale_bias", bias_shape=(2, 4), groups=2, dtype=torch.bfloat16),
            Case(comm, softmax="learnable"),
            Case(comm, "padding_causal", "thd", room=True, softmax="off-by-one"),
            Case(comm, value_size=8),
            Case(comm, checkpoint=True),
        )
    ],
    Case("p2p", groups=1),
    Case("all_gather", "padding_causal", "thd", window=(3, 0), room=True),
    Case("all_gather", "padding_causal", window=(3, 0)),
    Case("a2a", "padding_causal", "thd", window=(3, 0), room=True),
    Case("a2a", "padding", window=(3, 2)),
    Case("a2a", "padding_causal", by_mask=True),
    Case("a2a", "padding_causal_bottom_right", keys=24),
    Case("a2a", bias="alibi"),
    Case("a2a", "padding_causal", "thd", bias="alibi"),
]
FOUR = [
    *[
        case
        for comm in ("p2p", "a2a+p2p")
        for case in (
            Case(comm),
            Case(comm, "no_mask", "sbhd", groups=2, dtype=torch.bfloat16),
            Case(comm, "padding_causal", "thd", room=True),
            Case(comm, "padding", "thd", groups=2),
            Case(comm, "padding_causal", keys=16),
            Case(comm, window=(3, 0), softmax="learnable"),
        )
    ],
    Case("all_gather", "padding_causal", "thd", window=(3, 0), room=True),
    Case("a2a", "padding_causal", "thd", room=True),
]


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, outcomes, TWO)


@pytest.fixture(scope="module")
def four():
    return run_ranks(4, outcomes, FOUR)


def check(found, case):
    for errors in found:
        of_case = errors[str(case)]
        assert isinstance(of_case, list), of_case
        assert max(of_case) < BOUND[case.dtype]


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks(two, case):
    check(two, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks(four, case):
    check(four, case)
