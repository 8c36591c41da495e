"""Context-parallel attention gives the result of attention of whole sequences.

Bounds are for the norm of the error, relative to the norm of the exact result. In fp32, sums are
added in another order. In 16 bit there are three roundings, each of at most half a unit in the last
place: of the result of a part, of scores in 16-bit products, and of the merged result or the summed
gradient.
"""

from itertools import product

import pytest
import torch
from context_cases import Case, outcomes
from context_scenarios import everything
from peer_messages import recorded_rings, rings_in_peer_memory
from ranks import run_ranks

BOUND = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
TWO = [
    *[
        Case(comm, mask, qkv_format, groups=groups, dtype=dtype)
        for comm, mask, qkv_format, (groups, dtype) in product(
            ("p2p", "all_gather", "a2a"),
            ("causal", "no_mask"),
            ("bshd", "sbhd"),
            ((4, torch.float32), (2, torch.bfloat16)),
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
            Case(comm, "padding_causal", dtype=torch.float16),
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
    return run_ranks(2, everything, TWO)


@pytest.fixture(scope="module")
def two_gpus():
    return run_ranks(2, outcomes, TWO, backend="nccl")


@pytest.fixture(
    scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu(4))]
)
def four(request):
    return run_ranks(4, outcomes, FOUR, backend=request.param)


def check(found, case):
    for errors in found:
        of_case = errors[str(case)]
        assert isinstance(of_case, list), of_case
        assert max(of_case) < BOUND[case.dtype]


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks(two, case):
    check(two, case)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_gpus(two_gpus, case):
    check(two_gpus, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks(four, case):
    check(four, case)


@pytest.mark.parametrize(
    "world",
    [
        (2, "gloo"),
        (4, "gloo"),
        pytest.param((2, "nccl"), marks=pytest.mark.multi_gpu),
        pytest.param((4, "nccl"), marks=pytest.mark.multi_gpu(4)),
    ],
    ids=str,
)
def test_rings_in_peer_memory(world):
    ranks, backend = world
    cases = [case for case in (TWO if ranks == 2 else FOUR) if case.comm.endswith("p2p")]
    for found, received in run_ranks(ranks, rings_in_peer_memory, cases, backend=backend):
        assert received > 2 * len(cases) or backend == "nccl"
        for case in cases:
            check([found], case)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.multi_gpu(n)) for n in (2, 4)],
)
def test_rings_of_gpus_are_recorded(ranks):
    for found in run_ranks(ranks, recorded_rings, backend="nccl"):
        assert all(found), found


def test_layers_do_what_they_do_alone(two):
    for found in two:
        for errors, same_without_gradients, fused in found["layers"].values():
            assert max(errors.values()) < 1e-6
            assert same_without_gradients
            assert fused == [True]


def test_helpers_cut_and_join_sequences(two):
    for rank, outcome in enumerate(two):
        found = outcome["helpers"]
        tokens = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert found["own"].tolist() == tokens
        assert found["gathered"].tolist() == list(range(8))
        gradient = dict(zip(tokens, (1.0, 2.0, 3.0, 4.0), strict=True))
        assert found["gradient"].tolist() == [gradient.get(i, 0.0) for i in range(8)]
        assert found["sum"].tolist() == [3.0] * 4
        long = [[8, 9, 10, 11, 20, 21, 22, 23], list(range(12, 20))][rank]
        assert found["packed"].tolist() == tokens + long
        assert found["back"].tolist() == list(range(24))
        assert found["pair"][0][0].tolist() == tokens and found["pair"][1][:, 0].tolist() == tokens
        assert (
            "divisible by 4 (twice the context parallel ranks), got sequences of [6] tokens"
            in found["uneven"]
        )
        assert "got sequences of [14] tokens" in found["uneven packed"]


ARGUMENTS = {
    "x": "TypeError: [shard_sequence] expected x to be a torch.Tensor, got NoneType",
    "gathered": "TypeError: [gather_sequence] expected x to be a torch.Tensor, got list",
    "float": "TypeError: [shard_sequence] expected seq_dim to be an int, got 0.0",
    "ends": "TypeError: [shard_sequence] expected cu_seqlens to be a torch.Tensor, got list",
    "one dimension": "list of 2 dimensions, one for each tensor, got 0",
    "too few": "list of 2 dimensions, one for each tensor, got 1 of them",
}


def test_helpers_say_what_arguments_they_take(two):
    found = two[0]["helpers_refuse"]
    assert found.keys() == ARGUMENTS.keys()
    for name, text in ARGUMENTS.items():
        assert text in found[name]


def test_a_backward_refuses_lengths_that_have_changed(two):
    for outcome in two:
        assert "modified by an inplace operation" in outcome["changed_ends"]


def test_copies_of_layers_have_the_same_ranks(two):
    for outcome in two:
        assert outcome["copies"] == [(True, True)] * 2


REFUSALS = {
    "uneven": "two chunks of equal length in query_layer of each rank",
    "heads": "divisible by 2 (the ranks that exchange heads)",
    "type": "cp_comm_type in {p2p, all_gather, a2a, a2a+p2p}, got 'ring'",
    "list": "a list of two process groups",
    "pair": "to be one process group with cp_comm_type='p2p', got 2",
    "not a group": "TypeError: [DotProductAttention] expected cp_group to be a process group",
    "not a member": "to have this rank as a member",
    "ranks": "expected cp_global_ranks [0, 1], the ranks of cp_group, got [0, 2]",
    "stream": "expected cp_stream=None where there is no GPU",
    "alibi": "expected no ALiBi with cp_comm_type='p2p'",
    "mask": "expected cu_seqlens_q and cu_seqlens_kv with cp_comm_type='p2p', got a mask",
    "window": "expected no window of padded sequences with cp_comm_type='p2p', got (2, 0)",
    "columns": "4 queries (of this rank) and 8 keys (of all ranks)",
    "cache": "expected no inference_params",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_meaning_is_refused_in_words(two, name):
    text = two[0]["refusals"][name]
    assert REFUSALS[name] in text and text.endswith("(layer attend)")


LATER = {
    "lengths": "expected queries and keys of the same lengths",
    "mask": "expected attention_mask of 4 queries (of this rank) and 8 keys (of all ranks)",
    "bias": "expected a learned core_attention_bias with a row for each query",
}


def test_what_ranks_have_compared_hides_no_call_that_they_refuse(two):
    for found in two:
        for name, (first, later) in found["refusals_of_later_calls"].items():
            assert first == "no error", name
            assert later.startswith(f"ValueError: [DotProductAttention] {LATER[name.split()[0]]}")


def test_ranks_without_a_backend_say_so_before_anything_is_sent(two):
    first, second = (found["without_backends"] for found in two)
    assert first == second
    for before, between, after in first.values():
        assert before.startswith("ValueError: [attention] no dot product attention backend")
        assert between == "no error" and after == before


def test_biases_of_packed_sequences_are_refused_in_words(two):
    for text in (text for found in two for text in found["packed_biases"].values()):
        assert "[DotProductAttention] expected no core_attention_bias of packed sequences" in text


def test_backends_are_chosen_for_the_gradients_that_biases_need(two):
    for learned in (learned for found in two for learned in found["learned_biases"].values()):
        assert learned and all(learned)


MISFITS = {
    "bias heads": "a core_attention_bias that broadcasts to (2, 4, 4, 8)",
    "bias batch": "a core_attention_bias that broadcasts to (2, 4, 4, 8)",
    "mask heads": "an attention_mask that broadcasts to (2, 4, 4, 8)",
    "no mask": "expected attention_mask for the mask type 'arbitrary', got None",
    "float": "TypeError: [attention] expected attention_mask of dtype torch.bool",
    "padding": "the query padding mask in attention_mask of shape (2, 1, 1, 4), got (3, 1, 1, 4)",
    "batch": "cu_seqlens_q and cu_seqlens_kv of shape (3,), got (4,) and (4,)",
    "long": "cu_seqlens_q of sequences of at most 8 tokens, got the lengths [9, 3]",
    "falling": "cu_seqlens_q to rise from 0, got [0, 5, 4]",
    "packed batch": "cu_seqlens_q and cu_seqlens_kv of equal shape, got batches of 2 and 1",
    "slopes": "alibi_slopes of shape (4,) or (2, 4), got (3,)",
}
NOT_TAKEN = {"padding": "expected cu_seqlens_q and cu_seqlens_kv", "slopes": "expected no ALiBi"}


def test_tensors_that_do_not_fit_are_refused_on_all_ranks(two):
    first, second = (found["misfits_are_refused"] for found in two)
    assert first == second and len(first) == 3 * len(MISFITS)
    for name, (text, later) in first.items():
        kind, _, comm = name.rpartition(" ")
        assert (MISFITS if comm == "a2a" else MISFITS | NOT_TAKEN)[kind] in text, name
        assert later == "no error", name


DISAGREEMENTS = {
    "lengths": "RuntimeError: [DotProductAttention] expected ranks that do the same, got"
    " cu_seqlens_q [0, 3, 5] (rank 0), [0, 4, 5] (rank 1); cu_seqlens_kv",
    "long": "ValueError: [attention] expected cu_seqlens_q of sequences of at most 8 tokens",
    "uneven": "ValueError: [attention] expected cu_seqlens_q with lengths divisible by 4",
    "mask": "Error: [attention] expected attention_mask of dtype torch.bool",
    "bias": "expected ranks that do the same, got bias dtype torch.float32 (rank 0), torch.float16",
}


def test_tensors_that_fit_on_one_rank_alone_are_refused_on_all(two):
    for rank, found in enumerate(two):
        assert len(found["disagreements_on_tensors"]) == 3 * len(DISAGREEMENTS)
        for name, (text, later) in found["disagreements_on_tensors"].items():
            assert DISAGREEMENTS[name.split()[0]] in text and later == "no error", name
            kind = ("ValueError", "TypeError")[rank]
            assert text.startswith(kind) or not name.startswith("mask"), text


def test_masks_may_leave_out_leading_dimensions(two):
    assert all(len(found["masks_of_few_dimensions"]) == 6 for found in two)
    assert all(all(found["masks_of_few_dimensions"]) for found in two)


def test_packed_tokens_of_no_sequence_are_padding(two):
    for tensors in (found["without_sequences"] for found in two):
        assert len(tensors) == 12 and not any(x.any() for x in tensors)


LENGTHS = {
    "uneven": "lengths divisible by 4 (twice the context parallel ranks), got sequences of [2]",
    "too many": "expected cu_seqlens_q to rise from 0 to at most 24 (the tokens), got [0, 8, 28]",
    "none": "expected cu_seqlens_q",
    "fits": "no error",
}


def test_lengths_are_checked_before_anything_is_sent(two):
    for found in two:
        for name, text in found["lengths_that_do_not_fit"].items():
            assert LENGTHS[name.rpartition(" ")[0]] in text, name


def test_fp8_attention_with_heads_exchanged_is_that_of_whole_sequences(two):
    assert all(len(found["in_fp8"]) == 14 and all(found["in_fp8"]) for found in two)


def test_ranks_that_differ_say_so_on_each(two):
    first, second = (found["disagreements"] for found in two)
    assert "query tokens 4 (rank 0), 8 (rank 1)" in first["tokens"]
    assert "mask causal (rank 0), no_mask (rank 1)" in first["mask"]
    assert "dtype torch.float32 (rank 0), torch.bfloat16 (rank 1)" in first["dtype"]
    assert "precision high precision (rank 0), FP8 (rank 1)" in first["precision"]
    assert "mask shape (2, 4, 4, 8) (rank 0), (2, 1, 4, 8) (rank 1)" in first["mask shape"]
    assert "learned bias True (rank 0), False (rank 1)" in first["learned bias"]
    assert "query_layer of each rank" in first["one is uneven"]
    assert "(rank 1)" in first["one is uneven"]
    assert first["mask that nobody reads"] == "no error"
    assert first["met"] == 1  # the ranks compare once for three equal calls
    assert first == second


def test_a_rank_that_is_alone_with_a_call_ends_with_an_error(two):
    text = two[1]["alone"]
    assert "ranks 0, 1 to meet in a call of attention, but rank 0 did not come within 1 s" in text


def test_dropout_keeps_the_mean_and_the_backward_drops_what_the_forward_dropped(two):
    for mean, once, slope, difference in (x for found in two for x in found["dropping"].values()):
        assert mean < 0.06 and once > 0.3  # the error of one draw shrinks by the root of 300
        assert slope == pytest.approx(difference, rel=5e-3)


def test_compiled_code_leaves_its_graph_for_attention(two):
    assert all(found["compiled"] for found in two)
