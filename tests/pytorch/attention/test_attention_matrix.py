"""The test matrix of attention: every backend against the definition.

Pairwise cases run on the CPU and on a GPU. On a GPU the full product of fewer values runs, too: a
test for each backend, mask type and format, which prints how many cases passed and how many were
skipped for which reason (`pytest -rP`).
"""

from collections import Counter
from dataclasses import replace

import pytest
from cases.attention_factors import FACTORS, HAND_PICKED
from cases.attention_matrix import HEADS, check, pairwise, product, refusals

from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import BACKENDS, choice

# A warning of the compiler of flash-attn 4 about flash-attn's own kernels.
pytestmark = pytest.mark.filterwarnings("ignore:Argument .* cannot be converted to a JitArgument")
BY_NAME = {backend.name: backend for backend in BACKENDS}
# Values of the full product: head sizes that all kernels support, and some lengths that are not
# multiples of a tile.
ON_GPU = {
    "dtype": FACTORS["dtype"],
    "groups": [HEADS, 1],
    "bias": FACTORS["bias"],
    "window": [None, (5, 0), (5, 3)],
    "dropout": FACTORS["dropout"],
    "lengths": [(48, 48), (33, 64), (64, 33)],
    "sizes": [(64, 64)],
    "by_lengths": [False, True],
    "room": [False, True],
}
CASES = [*HAND_PICKED, *pairwise(FACTORS), *pairwise({**FACTORS, "bias": ["no_bias"]})]


@pytest.fixture
def only(monkeypatch):
    """Makes one backend run, after checking that the table for the call is as expected."""

    def force(name, expected):
        def choose(*facts):
            problem = choice.problem_of(*facts)
            assert choice.table(problem, choice.environment()) == expected
            return BY_NAME[name]

        monkeypatch.setattr(core, "choose", choose)

    return force


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairwise(only, device, name, case):
    if name == "flash4":
        case = replace(case, size=64, value_size=64)
    table = refusals(case, device)
    if table[name] is not None:
        pytest.skip(f"{name} {table[name]}")
    only(name, table)
    check(case, device)


def test_unfused_skips_nothing():
    for case in CASES:
        for device in ("cpu", "cuda"):
            assert refusals(case, device)["unfused"] is None


@pytest.mark.gpu
@pytest.mark.timeout(600)  # hundreds of shapes, for each of which cuDNN builds two graphs
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mask_type", FACTORS["mask_type"])
@pytest.mark.parametrize("qkv_format", FACTORS["qkv_format"])
def test_in_full(only, name, mask_type, qkv_format):
    counts, failures = Counter(), []
    for case in product({"mask_type": [mask_type], "qkv_format": [qkv_format], **ON_GPU}):
        table = refusals(case, "cuda")
        if table[name] is not None:
            counts[table[name]] += 1
            continue
        only(name, table)
        try:
            check(case, "cuda")
            counts["passed"] += 1
        except Exception as error:  # the other cases still run
            failures.append(f"{case}: {type(error).__name__} {str(error).partition(chr(10))[0]}")
    for reason, count in counts.most_common():
        print(f"{count:5} {name}: {reason}")
    assert not failures, "\n".join(failures)
    if not counts["passed"]:
        pytest.skip("; ".join(f"{reason} ({count})" for reason, count in counts.items()))
