"""`ub_*` arguments, under old and new names, and the collectives that they overlap."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.parallel.overlap import Overlap

SHARED = {"tp_size": 2, "sequence_parallel": True, "device": "cpu"}
EVERYTHING = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True}
COLUMNS, ROWS = Overlap(gather=True, grad_scatter=True), Overlap(scatter=True, grad_gather=True)


def linear(mode="column", **more):
    return te.Linear(32, 32, **{**SHARED, "parallel_mode": mode, "ub_name": "qkv", **more})


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (lambda: linear(**EVERYTHING), COLUMNS),
        (lambda: linear("row", **EVERYTHING), ROWS),
        (lambda: linear(None, **EVERYTHING), Overlap()),
        (lambda: linear(**EVERYTHING, sequence_parallel=False), Overlap()),
        (lambda: linear(**EVERYTHING, tp_size=1), Overlap()),
        (lambda: linear(ub_split_ag=True), Overlap(gather=True)),
        (lambda: linear("row", ub_atomic_gemm_rs=True), Overlap(scatter=True)),
        (lambda: linear(ub_bulk_dgrad=True, ub_bulk_wgrad=True, ub_name=None), Overlap()),
        (lambda: linear(ub_overlap_rs=True, ub_name=None), Overlap()),
        (
            lambda: te.LayerNormLinear(
                32, 32, parallel_mode="column", ub_name="qkv", **SHARED, **EVERYTHING
            ),
            COLUMNS,
        ),
        (
            lambda: te.LayerNormMLP(32, 64, set_parallel_mode=True, **SHARED, **EVERYTHING),
            Overlap(True, True, True, True),
        ),
        (lambda: te.LayerNormMLP(32, 64, **SHARED, **EVERYTHING), Overlap()),
    ],
)
def test_what_counts(module, expected):
    assert module().ranks.overlap == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (False, False, False)),
        ({"ub_overlap_ag": True}, (False, False, False)),
        ({"ub_tp_comm_overlap": True}, (True, True, False)),
        ({"ub_tp_comm_overlap": True, "ub_split_ag": False}, (False, True, False)),
        (
            {"ub_tp_comm_overlap": True, "ub_split_rs": False, "ub_atomic_gemm_rs": True},
            (True, True, False),
        ),
        (
            {"ub_tp_comm_overlap": True, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": True},
            (True, False, True),
        ),
    ],
)
def test_a_layer_hands_its_switch_on(flags, expected):
    gathers, scatters, grads = expected
    layer = te.TransformerLayer(32, 64, 4, set_parallel_mode=True, **SHARED, **flags)
    attention = layer.self_attention
    columns, rows = Overlap(gathers, False, False, grads), Overlap(False, scatters, gathers)
    assert attention.layernorm_qkv.ranks.overlap == columns
    assert attention.proj.ranks.overlap == rows
    assert layer.layernorm_mlp.ranks.overlap == Overlap(gathers, scatters, gathers, grads)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: linear(ub_overlap_ag=1), TypeError, "expected ub_overlap_ag to be True or False"),
        (lambda: linear(ub_name=3), TypeError, "expected ub_name to be a str or None, got 3"),
        (
            lambda: linear(ub_overlap_ag=True, ub_name=None, name="fc"),
            ValueError,
            r"expected ub_name .* overlap \(gather\), got none \(layer fc\)",
        ),
        (lambda: linear(ub_overlap_gg=True), TypeError, "did you mean ub_overlap_ag"),
        (lambda: linear(ub_tp_comm_overlap=True), TypeError, "unexpected keyword"),
        (
            lambda: te.GroupedLinear(2, 32, 32, ub_overlap_ag=True, device="cpu"),
            ValueError,
            "expected no overlap of communication, which it does not do, got ub_overlap_ag",
        ),
        (
            lambda: te.initialize_ub([64, 32], 2),
            RuntimeError,
            "expected torch.distributed.init_process_group before it",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_flags_change_nothing_on_one_rank():
    torch.manual_seed(0)
    layer = te.Linear(32, 32, device="cpu", sequence_parallel=True, **EVERYTHING)
    plain = te.Linear(32, 32, device="cpu")
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), plain(x))
    te.destroy_ub()
