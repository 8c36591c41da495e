"""The order of attention backends: by measured speed, but backends untested on GPUs are last."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention import DotProductAttention, attention_backends
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import BACKENDS, choice, policy, sdpa
from transformer_engine.pytorch.attention.backends.backend import FEW_ELEMENTS, Problem, refusal
from transformer_engine.pytorch.cuda_graphs.saved_scaling import capturing_graphs

LARGE = {"num_attention_heads": 32, "kv_channels": 128, "batch_size": 4}
LARGE |= {"max_seqlen_q": 4096, "max_seqlen_kv": 4096, "device": "cuda"}
WINDOW = {"window_size": (1024, 0)}
SMALL = {**LARGE, "max_seqlen_q": 128, "max_seqlen_kv": 128}


def order(**question):
    return list(attention_backends(**question))


def test_unconfirmed_backends_wait_behind_all_others():
    for question, first in ((LARGE, "flash4"), (SMALL, "cudnn"), ({"device": "cpu"}, "flash4")):
        names = order(**question)
        confirmed = [name in policy.CONFIRMED for name in names]
        assert confirmed == sorted(confirmed, reverse=True)
        assert names[0] == first


@pytest.mark.parametrize("changes", [{"softmax_type": "learnable"}, {"deterministic": True}])
def test_what_flash_attn_4_was_not_timed_with_is_cudnns(changes):
    names = order(**LARGE, **changes)
    assert names[0] == "cudnn"
    assert names.index("flash4") < names.index("sdpa")


# Batch, heads, groups, length, head size, and the faster backend of cuDNN and flash-attn 4; see the
# table in policy.py.
MEASURED = [
    (4, 32, 32, 4096, 128, "flash4"),
    (4, 32, 8, 4096, 128, "flash4"),
    (2, 32, 32, 8192, 128, "flash4"),
    (8, 32, 32, 2048, 64, "flash4"),
    (8, 12, 12, 1024, 64, "cudnn"),
]


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_faster_one_of_what_was_measured_comes_first(case, mask_type, is_training):
    batch, heads, groups, length, size, faster = case
    names = order(
        batch_size=batch,
        num_attention_heads=heads,
        num_gqa_groups=groups,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        kv_channels=size,
        attn_mask_type=mask_type,
        is_training=is_training,
        device="cuda",
    )
    assert names[0] == faster


def test_the_environment_asks_for_flash_attn(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert order(**LARGE)[:3] == ["flash4", "flash3", "flash2"]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert order(**LARGE)[:2] == ["flash4", "cudnn"]  # sorted by speed; both refuse


@pytest.fixture
def all_confirmed(monkeypatch):
    monkeypatch.setattr(policy, "CONFIRMED", {backend.name for backend in BACKENDS})


@pytest.mark.parametrize(
    ("changes", "large"),
    [
        ({}, True),
        ({"batch_size": None, "max_seqlen_q": None, "max_seqlen_kv": None}, True),
        ({"max_seqlen_q": 128, "max_seqlen_kv": 128}, False),
        ({"max_seqlen_q": 1, "attn_mask_type": "causal_bottom_right"}, False),
        ({"batch_size": 1, "window_size": (64, 0)}, False),
        ({"batch_size": 1, "window_size": (4000, 0)}, True),
        ({"batch_size": 1, "max_seqlen_q": 16384, "max_seqlen_kv": 16384, **WINDOW}, True),
    ],
)
def test_flash_attn_4_is_for_large_problems(all_confirmed, changes, large):
    """In small problems its host code takes longer than its kernels."""
    names = order(**{**LARGE, **changes})
    assert (names.index("flash4") < names.index("sdpa")) is large
    assert names[-1] == "unfused"


@pytest.mark.parametrize(("length", "faster"), [(2048, "flash4"), (1024, "cudnn")])
def test_the_time_of_the_host_does_not_count_in_graphs(length, faster):
    """The sizes are those of the measured GPT with 350M parameters, with all or half the tokens."""
    question = {"batch_size": 4, "num_attention_heads": 16, "device": "cuda"}
    question |= {"max_seqlen_q": length, "max_seqlen_kv": length}
    call = partial(order, **question)
    assert call()[0] == "cudnn"
    with capturing_graphs():
        assert call()[0] == faster
    assert call()[0] == "cudnn"


@pytest.mark.parametrize("announced", [False, True])
def test_a_call_asks_whether_captures_are_announced(announced, monkeypatch):
    seen = []
    monkeypatch.setattr(choice, "preference", lambda problem, _: seen.append(problem) or ("sdpa",))
    attention = DotProductAttention(2, 16, qkv_format="bshd")
    q = torch.randn(1, 24, 2, 16)
    with capturing_graphs() if announced else nullcontext():
        attention(q, q, q)
    assert [problem.in_graph for problem in seen] == [announced]


VALUES = {"key_size": 64, "value_size": 128}


@pytest.mark.parametrize("sizes", [{}, {"queries": 128}, {"keys": 128}, VALUES], ids=str)
def test_kernels_with_wrong_gradients_of_large_tensors_are_left_out(sizes):
    one = Problem(device="cuda", queries=4096, keys=4096, heads=32, groups=32, key_size=128)
    one, most = one._replace(**sizes), (1 << 31) // (4096 * 32 * 128)
    for batch, training, holds in (
        (most - 1, True, True),
        (most, True, False),
        (most, False, True),
    ):
        problem = one._replace(batch=batch, training=training)
        assert FEW_ELEMENTS.holds(problem, None) is holds
    asked = [backend.name for backend in BACKENDS if FEW_ELEMENTS in backend.requirements]
    assert set(asked) == {"cudnn", "cudnn_fp8"}
    large = one._replace(batch=most)
    allowed = AttentionVariables()
    assert refusal(sdpa.BACKEND, large, allowed) is None
    assert "2^31" in str(refusal(sdpa.BACKEND, large._replace(compiling=True), allowed))


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (3, 3)])
def test_torch_counts_the_larger_one_of_queries_and_the_result(sizes, monkeypatch):
    monkeypatch.setattr(sdpa, "MOST_ELEMENTS", 2 * 8 * 4)
    sides = [SimpleNamespace(shape=(2, 8, n), numel=lambda n=n: 16 * n) for n in sizes]
    sides[0].is_cuda = True
    assert sdpa._is_large((sides[0], *sides), 1) is (4 in sizes)


@pytest.mark.parametrize(("tokens", "value_size"), [(48, 16), (47, 16), (24, 32)])
def test_all_sequences_of_a_packed_call_count_as_one_tensor(tokens, value_size, monkeypatch):
    seen = []
    monkeypatch.setattr(choice, "MOST_ELEMENTS", 48 * 2 * 16)
    monkeypatch.setattr(choice, "preference", lambda problem, _: seen.append(problem) or ("sdpa",))
    attention = DotProductAttention(2, (16, value_size), qkv_format="thd", attn_mask_type="padding")
    q, ends = torch.randn(tokens, 2, 16), torch.tensor([0, 20, tokens], dtype=torch.int32)
    attention(q, q, torch.randn(tokens, 2, value_size), cu_seqlens_q=ends, cu_seqlens_kv=ends)
    problem = seen[0]._replace(device="cuda", training=True)
    assert problem.large is (tokens != 47)
    assert FEW_ELEMENTS.holds(problem, None) is not problem.large


@pytest.mark.parametrize("first", [[], ["cudnn"], ["efficient", "math"]], ids=str)
def test_cudnn_is_last_where_keys_are_cached_also_if_torch_has_put_it_first(monkeypatch, first):
    """An order that the user has set stays."""
    numbers = {"flash": 1, "efficient": 2, "math": 0, "cudnn": 3}
    torchs = [numbers[name] for name in ("flash", "efficient", "math", "cudnn")]
    now = sorted(torchs, key=lambda number: number not in [numbers[name] for name in first])
    monkeypatch.setattr(sdpa, "_TORCH_ORDER", torchs)
    monkeypatch.setattr(sdpa, "_CUDNN_FIRST", [3, 1, 2, 0])
    monkeypatch.setattr(sdpa, "_CUDNN_LAST", torchs)
    monkeypatch.setattr(sdpa, "_has_fast_cudnn", lambda device: True)
    orders = [now]
    monkeypatch.setattr(sdpa, "sdpa_order", lambda: orders[-1])
    monkeypatch.setattr(sdpa, "set_sdpa_order", orders.append)
    query = SimpleNamespace(device=torch.device("cuda", 0), shape=(1, 1, 1, 64))
    order = sdpa._order(query, query, cached=True, recorded=False, causal=False)
    assert order == (None if "math" in first else torchs)
    assert sdpa._in_order(order, sdpa.sdpa_order) == (now if order is None else torchs)
    assert orders[-1] == now


_FIRST_CALLS = """
import sys
import torch
import torch.nn.functional as F
from transformer_engine.pytorch.attention.backends import sdpa

x = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
if sys.argv[1] == "ours":
    order = sdpa._order(x, x, cached=True, recorded=False, causal=False)
    sdpa._in_order(order, lambda: F.scaled_dot_product_attention(x, x, x))
F.scaled_dot_product_attention(x, x, x)
print(sdpa.sdpa_order())
"""


@pytest.mark.gpu
def test_the_order_that_torch_sets_at_its_first_choice_stays_for_calls_of_the_user():
    torchs, after_ours = (
        subprocess.run(
            [sys.executable, "-c", _FIRST_CALLS, first], capture_output=True, text=True, check=True
        ).stdout
        for first in ("torch's", "ours")
    )
    assert after_ours == torchs


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_flash_attn_4_is_slower_on_padding(all_confirmed, qkv_format):
    names = order(**{**LARGE, "attn_mask_type": "padding_causal"}, qkv_format=qkv_format)
    assert names[0] == "cudnn"
    assert names.index("flash4") < names.index("sdpa")


def test_a_forward_without_gradient_in_training_mode_chooses_as_one_with(monkeypatch):
    """It may be the first forward of a checkpoint, whose recompute needs gradients."""
    problems = []

    def choose(*call):
        problems.append(choice.problem_of(*call))
        return choice.choose(*call)

    monkeypatch.setattr(core, "choose", choose)
    module = DotProductAttention(2, 8)
    qkv = [torch.randn(4, 1, 2, 8, requires_grad=True) for _ in range(3)]
    module(*qkv)
    with torch.no_grad():
        module(*qkv)
        module.eval()(*qkv)
    assert problems[0] == problems[1]
    assert not problems[2].training


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "recorded", "last"),
    [
        (128, 128, False, True, False),
        (192, 192, False, True, True),
        (192, 192, True, True, False),
        (256, 192, True, True, True),
        (192, 192, False, False, False),
        (1, 128, False, True, True),
    ],
)
def test_cudnn_is_last_where_its_gradients_may_be_nan(
    monkeypatch, queries, keys, causal, recorded, last
):
    monkeypatch.setattr(sdpa, "_has_fast_cudnn", lambda device: True)
    monkeypatch.setattr(sdpa, "sdpa_order", lambda: sdpa._CUDNN_FIRST)
    query, key = (
        SimpleNamespace(device=torch.device("cuda", 0), shape=(1, 1, n, 64))
        for n in (queries, keys)
    )
    order = sdpa._order(query, key, False, recorded, causal)
    assert order == (sdpa._CUDNN_LAST if last else sdpa._CUDNN_FIRST)
