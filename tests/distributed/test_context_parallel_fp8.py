"""Context-parallel attention in FP8 equals its definition, cast by cast.

The definition (`fp8_attention_definition.py`) computes whole sequences by formulas, with the scales
of the module. Sums in another order may round a number to a neighbouring FP8 code, so up to 2 % of
the elements may differ. If the definition leaves out any one of the casts, 14 % of the elements or
more differ.

One process casts the softmax weights of whole sequences; a ring casts those of parts. In the
backward, the gradient of the softmax subtracts a mean: one process computes the mean from exact
weights, ranks from their result, which comes from rounded weights. Small differences then round to
other codes. The two are therefore compared by their distance from attention in high precision. The
distance of ranks is larger: by up to a third if weights exceed the largest of the step before,
otherwise by up to a fifth.
"""

import pytest
import torch
from context_cases import Case
from context_fp8 import STEPS, fp8_everything, fp8_outcomes
from context_fp8_fused import CASES, fused_outcomes
from ranks import run_ranks

TWO = [
    case
    for comm in ("p2p", "all_gather")
    for case in (
        Case(comm, "no_mask"),
        Case(comm, "causal", "sbhd", groups=2),
        Case(comm, "padding", "thd"),
        Case(comm, "padding_causal", "thd", groups=2, room=True),
        Case(comm, groups=1, dtype=torch.bfloat16),
        Case(comm, softmax="learnable"),
        Case(comm, checkpoint=True),
    )
]
FOUR = [
    Case("p2p", "no_mask"),
    Case("p2p", "causal"),
    Case("a2a+p2p", "no_mask", "sbhd", groups=2),
    Case("a2a+p2p", "causal"),
    Case("a2a+p2p", "padding_causal", "thd", groups=2, room=True),
]


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def two(request):
    return run_ranks(2, fp8_everything, TWO, backend=request.param)


@pytest.fixture(
    scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu(4))]
)
def four(request):
    return run_ranks(4, fp8_outcomes, FOUR, backend=request.param)


def check(found, case):
    for outcome in found:
        steps = outcome[str(case)]
        assert isinstance(steps, list), steps
        assert len(steps) == STEPS
        for step in steps:
            assert step["off"] < 0.02 and step["least"] > 0.1
            assert step["amaxes"] < 1e-5
            for error, single in zip(step["errors"], step["single"], strict=True):
                assert error < 1.5 * single
            assert all(shared == single for shared, single in step["scales"])


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks(two, case):
    check(two, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks(four, case):
    check(four, case)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def test_parts_by_cudnn(backend):
    """The results of parts are rounded once more than the result of one process."""
    for found, computed in run_ranks(2, fused_outcomes, backend=backend):
        # Ranks compute at least two parts in each step. One process makes one call per case, except
        # with a sink; its later steps run from a recording.
        assert computed >= 2 * STEPS * len(CASES) + len(CASES) - 1
        for steps in found.values():
            for ours, theirs, equal_scales in steps:
                assert equal_scales
                for error, single in zip(ours, theirs, strict=True):
                    assert error < 1.3 * single


def test_keys_and_values_are_sent_as_codes(two):
    codes, sums = (1024, 1024), (1024, 4096)
    for found in two:
        assert found["sent"]["p2p"] == [codes, codes, sums, sums]  # keys are sent once
        assert found["sent"]["all_gather"] == [codes] * 4


def test_calibration_is_in_high_precision_and_leaves_amaxes(two):
    for error, amax, largest in (x for found in two for x in found["calibrated"].values()):
        assert error < 1e-6
        assert amax == largest


def test_a_recomputed_region_repeats_the_bits(two):
    for found in two:
        for equal in found["recomputed"].values():
            assert len(equal) == 10 and all(equal)


def test_calls_and_calibrations_without_a_backend_are_errors(two):
    for found in two:
        assert len(found["forbidden"]) == 6
        for text in found["forbidden"]:
            assert "no dot product attention backend" in text
            assert "switched off by NVTE_UNFUSED_ATTN=0" in text


def test_ranks_with_scales_of_their_own_are_refused_in_words(two):
    for found in two:
        assert len(found["own_scales"]) == 2
        for text in found["own_scales"]:
            assert "expected a recipe with reduce_amax and an fp8_group with all ranks" in text
