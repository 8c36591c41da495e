"""`return_max_logit` of ranks that share sequences is that of one rank with whole sequences.

`tests/pytorch/attention/test_max_logit.py` compares one rank with the definition. Parts compute the
same products in other orders: fp32 has rounding errors of its own, bf16 may round up or down.
"""

from itertools import product

import pytest
import torch
from context_cases import HEADS, Case
from context_max_logit import COMMS, DRAWS, four_ranks, two_ranks
from ranks import run_ranks

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
TWO = [
    *[
        Case(comm, mask, qkv_format, groups=2)
        for comm, mask, qkv_format in product(COMMS, ("causal", "no_mask"), ("bshd", "sbhd"))
    ],
    *[
        Case(comm, mask, "thd", groups=2, room=room)
        for comm, mask, room in product(COMMS, ("padding", "padding_causal"), (False, True))
    ],
    *[
        case
        for comm in COMMS
        for case in (
            Case(comm, dtype=torch.bfloat16),
            Case(comm, "padding_causal"),
            Case(comm, "padding_causal_bottom_right", "sbhd"),
            Case(comm, "padding", "sbhd", keys=24),
            Case(comm, "arbitrary", groups=2),
            Case(comm, "causal", window=(3, 0)),
            Case(comm, "no_mask", "sbhd", window=(2, 3)),
            Case(comm, "causal_bottom_right", keys=24),
            Case(comm, "causal", keys=24),
            Case(comm, bias="post_scale_bias", groups=2),
            Case(comm, "no_mask", bias="pre_scale_bias", bias_shape=(1, 1)),
            Case(comm, softmax="learnable"),
            Case(comm, value_size=8),
        )
    ],
    Case("all_gather", "padding_causal", "thd", window=(3, 0), room=True),
    Case("all_gather", "padding_causal", window=(3, 0)),
    Case("a2a", "padding_causal", "thd", window=(3, 0), room=True),
    Case("a2a", "padding", window=(3, 2)),
    Case("a2a", "padding_causal", by_mask=True),
    Case("a2a", bias="alibi"),
    Case("a2a", "padding_causal", "thd", bias="alibi"),
]
FOUR = [
    *[
        case
        for comm in ("p2p", "a2a+p2p")
        for case in (
            Case(comm),
            Case(comm, "no_mask", "sbhd", groups=2),
            Case(comm, "padding_causal", "thd", room=True),
            Case(comm, "padding", "thd", groups=2),
            Case(comm, window=(3, 0), softmax="learnable"),
        )
    ],
    Case("all_gather", "padding_causal", "thd", window=(3, 0), room=True),
    Case("a2a", "padding_causal", "thd", room=True),
]


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def two(request):
    return run_ranks(2, two_ranks, TWO, backend=request.param)


@pytest.fixture(
    scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu(4))]
)
def four(request):
    return run_ranks(4, four_ranks, FOUR, backend=request.param)


def check_close(found, expected, dtype=torch.float32) -> None:
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=BOUND[dtype], atol=BOUND[dtype])


def check(found, case) -> None:
    for outcome in found:
        of_case = outcome[str(case)]
        assert isinstance(of_case, list), of_case
        assert len(of_case) == DRAWS
        for expected, own, of_all, same in of_case:
            check_close(own, expected, case.dtype)
            assert all(torch.equal(own, other) for other in of_all)
            assert same


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks(two, case) -> None:
    check(two, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks(four, case) -> None:
    check(four, case)


def test_ranks_have_their_own_heads(four) -> None:
    for rank, outcome in enumerate(four):
        for expected, own in outcome["of_tensor_parallel_ranks"]:
            check_close(own, expected.chunk(2)[rank % 2])


def test_fp8_attention(two) -> None:
    for outcome in two:
        assert len(outcome["in_fp8"]) == 2 * len(COMMS)
        for expected, own in outcome["in_fp8"]:
            check_close(own, expected)


def test_heads_that_see_nothing(two) -> None:
    for masked, packed in (pair for outcome in two for pair in outcome["blind_heads"]):
        assert masked.isneginf().tolist() == [False, True, False, False]
        assert packed.tolist() == [float("-inf")] * HEADS


def test_nan_of_any_rank_reaches_all(two) -> None:
    for found in (x for outcome in two for x in outcome["not_a_number"]):
        assert found.isnan().tolist() == [True, False, True, False]


def test_a_rank_that_does_not_ask_is_an_error_on_all(two) -> None:
    for outcome in two:
        assert len(outcome["disagreements"]) == len(COMMS)
        for text, later in outcome["disagreements"]:
            assert "got return_max_logit True (rank 0), False (rank 1)" in text
            assert later


def test_compiled_code(two) -> None:
    for outcome in two:
        assert len(outcome["compiled"]) == 12 * len(COMMS) and all(outcome["compiled"])
