"""The test matrix of attention: every backend against the definition, and its skips.

On the CPU pairwise cases run, on a GPU the full product, in which each test is one backend, mask
type and format; the product's counts are printed (`pytest -rP`).
"""

from collections import Counter

import pytest
import torch
from pytorch.cases.attention_matrix import HEADS, Case, check, pairwise, product, refusals

from transformer_engine.pytorch.attention import choice, core
from transformer_engine.pytorch.attention.backends import BACKENDS
from transformer_engine.pytorch.attention.masks import MASK_TYPES

# What the compiler of flash-attn 4 says of its own kernels.
pytestmark = pytest.mark.filterwarnings("ignore:Argument .* cannot be converted to a JitArgument")
BY_NAME = {backend.name: backend for backend in BACKENDS}
FACTORS = {
    "mask_type": [*MASK_TYPES],
    "qkv_format": ["sbhd", "bshd", "thd"],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "groups": [HEADS, 2, 1],
    "bias": ["no_bias", "pre_scale_bias", "post_scale_bias", "alibi", "slopes"],
    "window": [None, (2, 0), (2, 1), (1, -1)],
    "dropout": [0.0, 0.25],
    "lengths": [(7, 7), (5, 9), (9, 5)],
    "sizes": [(16, 16), (24, 16), (16, 40)],
    "bias_shape": [(3, HEADS), (1, HEADS), (1, 1)],
    "by_lengths": [False, True],
    "room": [False, True],
}
# What a GPU runs in full: sizes that all kernels take, and lengths that are no multiple of a tile.
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
CROSS = {"queries": 5, "keys": 9}
HAND_PICKED = [
    Case(),
    Case("causal", size=256, value_size=256, dtype=torch.bfloat16),
    Case("causal"),
    Case("causal", dtype=torch.bfloat16, qkv_format="bshd"),
    Case("causal", dtype=torch.float16, groups=2),
    Case("no_mask", **CROSS, groups=1),
    Case("no_mask", **CROSS, value_size=8, qkv_format="bshd"),
    Case("causal", **CROSS, qkv_format="bshd"),
    Case("causal", queries=9, keys=5),
    Case("causal_bottom_right", **CROSS),
    Case("causal_bottom_right", queries=9, keys=5, dtype=torch.bfloat16),  # blind queries
    Case("no_mask", window=(2, 1)),
    Case("no_mask", **CROSS, window=(1, -1), groups=2),
    Case("causal", window=(2, 0), dtype=torch.bfloat16),
    Case("padding"),
    Case("padding", **CROSS, qkv_format="bshd", dtype=torch.bfloat16),
    Case("padding", **CROSS, window=(2, 2)),
    Case("padding_causal", qkv_format="bshd", groups=2),
    Case("padding,causal", dtype=torch.float16),
    Case("padding_causal_bottom_right", **CROSS, window=(3, 0)),
    Case("arbitrary"),
    Case("arbitrary", **CROSS, qkv_format="bshd", groups=2, value_size=24, dtype=torch.bfloat16),
    Case("arbitrary", window=(2, 2)),
    Case("padding", qkv_format="thd"),
    Case("padding_causal", qkv_format="thd", groups=2, dtype=torch.bfloat16),
    Case("padding_causal_bottom_right", **CROSS, qkv_format="thd", value_size=8),
    Case("padding", **CROSS, qkv_format="thd", window=(1, 1)),
    Case("no_mask", bias="post_scale_bias"),
    Case("causal", bias="pre_scale_bias", bias_shape=(1, HEADS), groups=2),
    Case("padding", bias="post_scale_bias", bias_shape=(3, 1), dtype=torch.bfloat16),
    Case("arbitrary", bias="post_scale_bias", bias_shape=(1, 1), qkv_format="bshd"),
    Case("causal", bias="alibi"),
    Case("no_mask", **CROSS, bias="alibi", qkv_format="bshd", dtype=torch.bfloat16),
    Case("padding", **CROSS, bias="alibi"),
    Case("padding_causal", bias="alibi", qkv_format="thd"),
]
CASES = [*HAND_PICKED, *pairwise(FACTORS), *pairwise({**FACTORS, "bias": ["no_bias"]})]


@pytest.fixture
def only(monkeypatch):
    """Makes one backend run, after a look at what the choice would have depended on."""

    def force(name, expected):
        def choose(query, key, value, call):
            problem = choice.problem_of(query, key, value, call)
            assert choice.table(problem, choice.environment()) == expected
            return BY_NAME[name]

        monkeypatch.setattr(core, "choose", choose)

    return force


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairwise(only, device, name, case):
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
        except Exception as error:  # all cases are worth a look, not the first one alone
            failures.append(f"{case}: {type(error).__name__} {str(error).partition(chr(10))[0]}")
    for reason, count in counts.most_common():
        print(f"{count:5} {name}: {reason}")
    assert not failures, "\n".join(failures)
    if not counts["passed"]:
        pytest.skip("; ".join(f"{reason} ({count})" for reason, count in counts.items()))
