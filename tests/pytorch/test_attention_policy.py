"""The order of attention backends: speed as measured, and what waits until a GPU has run it."""

import pytest
import torch

from transformer_engine.pytorch.attention import (
    DotProductAttention,
    attention_backends,
    choice,
    core,
    policy,
)
from transformer_engine.pytorch.attention.backends import BACKENDS

LARGE = {"num_attention_heads": 32, "kv_channels": 128, "batch_size": 4}
LARGE |= {"max_seqlen_q": 4096, "max_seqlen_kv": 4096, "device": "cuda"}
SMALL = {**LARGE, "max_seqlen_q": 128, "max_seqlen_kv": 128}


def order(**question):
    return list(attention_backends(**question))


def test_unconfirmed_backends_wait_behind_all_others():
    for question in (LARGE, SMALL, {"device": "cpu"}):
        names = order(**question)
        confirmed = [name in policy.CONFIRMED for name in names]
        assert confirmed == sorted(confirmed, reverse=True)
        assert names[0] == "cudnn"


def test_the_environment_asks_for_flash_attn(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert order(**LARGE)[:3] == ["flash4", "flash3", "flash2"]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert order(**LARGE)[0] == "cudnn"


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
    ],
)
def test_flash_attn_4_is_for_large_problems(all_confirmed, changes, large):
    """Its host time would show in small ones."""
    names = order(**{**LARGE, **changes})
    assert (names.index("flash4") < names.index("sdpa")) is large
    assert names[-1] == "unfused"


def test_a_forward_without_gradient_in_training_mode_chooses_as_one_with(monkeypatch):
    """It may be the first of a checkpoint, which the second one repeats with a gradient."""
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
