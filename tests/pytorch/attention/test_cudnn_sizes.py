"""Which calls share graphs of cuDNN, without a GPU: what cuDNN would be asked is replaced."""

import pytest
import torch
from cases import fake_cudnn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import cudnn, cudnn_sizes
from transformer_engine.pytorch.attention.backends.backend import Problem
from transformer_engine.pytorch.attention.masks.masks import mask_rule
from transformer_engine.pytorch.kernels.attention import OWN_GRAPH

MOST = cudnn_sizes.MOST_OWN_GRAPHS


@pytest.fixture
def asked(monkeypatch):
    """Problems that cuDNN was asked about, all of which it takes."""
    problems = []
    monkeypatch.setattr(cudnn_sizes, "ask", lambda problem, shared: problems.append(problem) or "")
    return problems


def problem_of(heads, tokens, **settings):
    """A problem of its own kind, by its number of heads: decisions last as long as the process."""
    how = {"rule": mask_rule("causal"), "batch": 2, "queries": tokens, "keys": tokens}
    own = {"device": "cuda", "gpu": 0, "heads": heads, "groups": heads}
    return Problem(**{**how, **own, **settings})


def test_sizes_after_the_first_ones_share(asked):
    sizes = range(100, 100 + 2 * MOST)
    decisions = [cudnn_sizes.shares(problem_of(101, n)) for n in sizes]
    assert decisions == [False] * MOST + [True] * MOST
    assert [problem.queries for problem in asked] == [*sizes[MOST:]]
    assert [cudnn_sizes.shares(problem_of(101, n)) for n in reversed(sizes)] == decisions[::-1]


def test_inference_does_not_use_up_the_graphs_of_trainings(asked):
    for n in range(100, 100 + MOST + 1):
        last = cudnn_sizes.shares(problem_of(102, n, training=False))
    assert last and not cudnn_sizes.shares(problem_of(102, 1000))


def test_where_cudnn_refuses_the_shared_graph_no_size_shares(monkeypatch):
    monkeypatch.setattr(cudnn_sizes, "ask", lambda problem, shared: "no such kernel")
    assert not any(cudnn_sizes.shares(problem_of(103, n)) for n in range(100, 102 + MOST))


@pytest.mark.parametrize(
    "settings",
    [
        {"qkv_format": "thd", "rule": mask_rule("padding")},
        {"rule": mask_rule("padding_causal")},
        {"rule": mask_rule("arbitrary")},
        {"rule": mask_rule("causal"), "keys": 4000},
        {"rule": mask_rule("no_mask", (5, 5)), "keys": 4000},
        {"bias_type": "post_scale_bias"},
        {"softmax_type": "learnable"},
        {"part": True},
        {"batch": None},
        {"queries": 16, "keys": 16},
    ],
    ids=str,
)
def test_calls_that_never_share(asked, settings):
    for n in range(100, 102 + MOST):
        assert not cudnn_sizes.shares(problem_of(104, n, **settings))


def test_layers_pass_their_lengths(asked, monkeypatch):
    passed = []

    def forward(query, key, value, settings, *others):
        passed.append((settings[0], settings[-2:]))
        return fake_cudnn.attention_forward(query, key, value, settings, *others)

    fake_cudnn.serve(monkeypatch)
    monkeypatch.setattr(cudnn, "attention_forward", forward)
    monkeypatch.setattr(cudnn, "attention_backward", fake_cudnn.attention_backward)
    layer = te.DotProductAttention(1, 16, qkv_format="bshd")
    for n in [*range(20, 21 + MOST), 20]:
        x = torch.randn(3, 1, n, 1, 16, dtype=torch.bfloat16, requires_grad=True)
        layer(*x.unbind(0)).sum().backward()
    last = 20 + MOST
    assert [longest for _, longest in passed] == [OWN_GRAPH] * MOST + [(last, last), OWN_GRAPH]


def test_sequences_of_similar_lengths_share_a_plan(monkeypatch):
    fake_cudnn.serve(monkeypatch)
    layer = te.DotProductAttention(1, 16, qkv_format="thd", attn_mask_type="padding_causal")
    for n in (*range(65, 81), 64, 81):
        x = torch.randn(3, 100, 1, 16, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.tensor([0, n, 100], dtype=torch.int32)
        layer(
            *x.unbind(0), cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=n, max_seqlen_kv=n
        ).sum().backward()
    found = {plan.options.call.query_sequences.longest for plan in layer._core._plans.values()}
    assert found == {64, 80, 96}
