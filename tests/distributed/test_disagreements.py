"""Errors of ranks that differ: each rank says what differs, and on which rank."""

import re

import pytest
from disagreement_ranks import CASES, disagreements
from ranks import run_ranks

DELAYED = "DelayedScaling\\(.*\\)"
EXPECTED = {
    "a_module_that_one_lacks": r"a call of layer fc1 \(rank 0\), a call of layer fc2 \(rank 1\)",
    "a_replica_with_fewer_modules": (
        r"FP8 modules 2 \(rank 0\), 1 \(rank 1\); scales of them \[3, 3\] \(rank 0\), \[3\] .*"
    ),
    "other_shapes": r"input \[\[16, 64\]\] \(rank 0\), \[\[32, 64\]\] \(rank 1\)",
    "another_recipe": (
        r"GEMMs in fp8_delayed_scaling \(rank 0\), fp8_current_scaling \(rank 1\); "
        rf"recipe {DELAYED} \(rank 0\), Float8CurrentScaling\(.*\) \(rank 1\)"
    ),
    "another_activation": (
        r"stage 3 activation\(kind=0, .*\) \(rank 0\), activation\(kind=\d, .*\) \(rank 1\) "
        r"\(layer mlp\)"
    ),
    "another_dropout": (
        r"stage 4 attention\(.* dropout=0.0, .*\) \(rank 0\), attention\(.* dropout=0.1, .*\) "
        r"\(rank 1\); .* \(layer layer.self_attention.layernorm_qkv\)"
    ),
    "a_replica_with_another_recipe": (
        r"recipe DelayedScaling\(.*amax_history_len=4,.*\) \(rank 0\), "
        r"DelayedScaling\(.*amax_history_len=5,.*\) \(rank 1\)"
    ),
    "another_configuration_of_the_debugger": (
        r"configuration \w{12} of look \(rank 0\), \w{12} of look \(rank 1\)"
    ),
    "no_autocast_on_one": (
        r"GEMMs in high precision \(rank 0\), fp8_delayed_scaling \(rank 1\); "
        rf"recipe none \(rank 0\), {DELAYED} \(rank 1\)"
    ),
    "classes_in_unequal_parts": r"classes of a rank 8 \(rank 0\), 16 \(rank 1\)",
    "sequences_of_unequal_parts": r"x \[4\] \(rank 0\), \[8\] \(rank 1\)",
    "sequences_that_end_elsewhere": (
        r"cu_seqlens \[0, 4, 16\] \(rank 0\), \[0, 8, 16\] \(rank 1\)"
    ),
    "one_sequence_or_several": (
        r"sequences None \(rank 0\), 3 \(rank 1\); "
        r"cu_seqlens nothing \(rank 0\), \[0, 8, 16, 24\] \(rank 1\)"
    ),
    "no_gradients_on_one": r"gradients \[False, .* \(rank 0\), \[False, True.* \(rank 1\)",
}
ALIKE = (
    "meetings_of_some_ranks_before",
    "nothing",
    "sequences_of_many_lengths",
    "attention_to_many_lengths",
)
OPS = {
    "a_replica": "autocast",
    "another_configuration": "statistics",
    "another_activation": "LayerNormMLP",
    "another_dropout": "LayerNormLinear",
    "classes": "parallel_cross_entropy",
    "sequences": "gather_sequence",
    "one_sequence": "gather_sequence",
}


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(2, disagreements)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_rank_says_what_differs(name: str, said: list[dict[str, str]]) -> None:
    op = next((op for prefix, op in OPS.items() if name.startswith(prefix)), "Linear")
    for rank, found in enumerate(said):
        layer = rf" \(layer fc{1 + rank if 'module' in name else ''}\)" if op == "Linear" else ""
        text = rf"\[{op}\] expected ranks that do the same, got {EXPECTED[name]}{layer}"
        assert re.fullmatch(text, found[name]), found[name]


def test_who_waits_in_vain_names_the_other(said: list[dict[str, str]]) -> None:
    assert said[0]["a_rank_that_does_not_come"] == (
        "[Linear] expected ranks 0, 1 to meet in a call of layer fc, but rank 1 did not come within"
        " 1 s: all ranks of a group must run the same layers, in the same order, with the same"
        " shapes and recipes"
    )


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_that_do_the_same_say_nothing(name: str, said: list[dict[str, str]]) -> None:
    assert [found[name] for found in said] == ["", ""]


def test_every_case_is_looked_at() -> None:
    assert {*EXPECTED, *ALIKE, "a_rank_that_does_not_come"} == set(CASES)
