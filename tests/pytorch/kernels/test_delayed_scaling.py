"""The update of delayed scaling, compared with its definition in Python."""

import math

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.kernels.delayed_scaling import (
    delayed_scaling_update,
    entry,
    gather_amax,
    spread,
)

FLOAT_MAX = torch.finfo(torch.float32).max
SHAPES = [(1, 3), (2, 1), (16, 6), (1024, 3), (33, 40), (300, 1), (4, 0)]  # (length, count)


def table_of(states, device):
    rows = [entry(scale, history) for history, scale in states]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6).to(device)


def apart(x, gap, device):
    """The same values with adjacent elements in each column, and `gap` elements between columns."""
    columns = x.view(len(x), 1) if x.dim() == 1 else x.t()
    room = torch.full((columns.shape[0], columns.shape[1] + gap), -7.0, device=device)
    room[:, : columns.shape[1]] = columns
    return room[:, : columns.shape[1]].t() if x.dim() == 2 else room[:, 0]


def expected_column(history, scale, newest, settings, own_amax, own_scale):
    """New history (a list of floats) and scale of one column."""
    if newest == 0:
        return history, scale
    algorithm, fp8_max, margin = settings
    amax = newest if algorithm == "most_recent" else max([newest, *history[1:]])
    if own_amax is not None:
        amax = own_amax
    if own_scale is not None:
        scale = scale if math.isnan(own_scale) else min(own_scale, FLOAT_MAX)
    elif amax > 0 and math.isfinite(amax):
        ratio = torch.tensor(fp8_max) / torch.tensor(amax) / 2.0**margin
        scale = min(ratio.item(), FLOAT_MAX)
    if len(history) == 1:
        return [0.0], scale
    return [0.0, *history[2:], newest], scale


def expected_update(states, reduced, settings, own):
    def of_column(values, index):
        return values[index].item() if values is not None else None

    first, updated = 0, []
    for history, scale in states:
        columns, scales = [], []
        for i in range(history.shape[1]):
            values = history[:, i].tolist()
            newest = of_column(reduced, first + i) or values[0]
            own_values = (of_column(x, first + i) for x in own)
            column = expected_column(values, scale[i].item(), newest, settings, *own_values)
            columns.append(column[0])
            scales.append(column[1])
        first += history.shape[1]
        new_history = torch.tensor(columns).T.contiguous() if columns else history.clone()
        updated.append((new_history, torch.tensor(scales)))
    return updated


def random_states():
    states = []
    for shape in SHAPES:
        history = torch.rand(shape) * 10
        history[0][torch.rand(shape[1]) < 0.3] = 0.0  # tensors that were not cast in this step
        states.append((history, torch.rand(shape[1]) + 0.5))
    return states


def check(states, device, reduced=None, algorithm="max", fp8_max=448.0, margin=0, own=(None, None)):
    expected = expected_update(states, reduced, (algorithm, fp8_max, margin), own)
    reduced, *own = (None if x is None else x.to(device) for x in (reduced, *own))
    for gap in (0, 3):
        moved = [tuple(apart(x, gap, device) for x in state) for state in states]
        delayed_scaling_update(table_of(moved, device), reduced, algorithm, fp8_max, margin, *own)
        for state, new in zip(moved, expected, strict=True):
            for got, wanted in zip(state, new, strict=True):
                assert_bitwise(got, wanted)
                room = got._base  # [columns, rows and gap]
                assert not gap or (room[:, -gap:] == -7.0).all()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
def test_matches_definition(device, algorithm, margin, fp8_max):
    check(random_states(), device, algorithm=algorithm, fp8_max=fp8_max, margin=margin)


@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_reduced_amax_stands_for_row_0(device, algorithm):
    states = random_states()
    local = torch.cat([history[0] for history, _ in states])
    other = torch.rand(local.shape) * 20
    other[torch.rand(local.shape) < 0.3] = 0.0
    check(states, device, reduced=torch.maximum(local, other), algorithm=algorithm)
    check(states, device, reduced=torch.zeros_like(local), algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("newest", [math.inf, math.nan, 1e-40, FLOAT_MAX, 1e-37, -0.0])
@pytest.mark.parametrize("length", [1, 3])
def test_extreme_amax(device, algorithm, newest, length):
    history = torch.zeros(length, 2)
    history[0] = torch.tensor([newest, 2.0])
    check([(history, torch.tensor([3.0, 4.0]))], device, algorithm=algorithm)


@pytest.mark.sanitize
@pytest.mark.parametrize("with_reduced", [False, True])
@pytest.mark.parametrize("which", ["amax", "scale", "both"])
def test_values_of_a_recipes_own_functions(device, which, with_reduced):
    states = random_states()
    count = sum(history.shape[1] for history, _ in states)
    extreme = torch.tensor([math.nan, math.inf, 0.0, 1e-40, FLOAT_MAX])
    own = [torch.cat([extreme, torch.rand(count - 5) + 0.5]) for _ in range(2)]
    own = (None if which == "scale" else own[0], None if which == "amax" else own[1])
    reduced = torch.rand(count) * 20 if with_reduced else None
    if reduced is not None:
        reduced[torch.rand(count) < 0.3] = 0.0
    check(states, device, reduced=reduced, margin=2, own=own)


def test_infinity_leaves_with_its_row(device):
    """After an overflow, the scale stays the same until infinity has left the history."""
    history = torch.tensor([[math.inf], [1.0], [2.0]], device=device)
    scale = torch.tensor([5.0], device=device)
    table = table_of([(history, scale)], device)
    seen = []
    for _ in range(4):
        delayed_scaling_update(table, None, "max", 448.0, 0)
        seen.append(scale.item())
        history[0] = 4.0
    assert seen == [5.0, 5.0, 5.0, 112.0]


def test_columns_of_one_state_are_independent(device):
    history = apart(torch.tensor([[0.0, 8.0], [1.0, 2.0], [3.0, 4.0]]), 0, device)
    scale = torch.tensor([1.0, 1.0], device=device)
    delayed_scaling_update(table_of([(history, scale)], device), None, "max", 448.0, 0)
    assert history.tolist() == [[0.0, 0.0], [1.0, 4.0], [3.0, 8.0]]
    assert scale.tolist() == [1.0, 56.0]


@pytest.mark.sanitize
def test_gather(device):
    states = [
        tuple(apart(x, i % 4, device) for x in state) for i, state in enumerate(random_states())
    ]
    columns = sum(h.shape[1] for h, _ in states)
    got = gather_amax(table_of(states, device), columns)
    assert_bitwise(got, torch.cat([h[0] for h, _ in states]))


@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("with_reduced", [False, True])
def test_gather_finds_what_the_update_goes_by(device, algorithm, with_reduced):
    states = random_states()
    states[0][0][0, :2] = torch.tensor([math.nan, math.inf])
    states[2][0][:9, 1] = math.nan
    columns = [column for history, _ in states for column in history.t().tolist()]
    reduced = torch.rand(len(columns)).round() * 11 if with_reduced else None
    expected = []
    for i, (newest, *older) in enumerate(columns):
        values = [(reduced is not None and reduced[i].item()) or newest]
        values += older if algorithm == "max" else []
        expected.append(max([0.0, *(v for v in values if not math.isnan(v))]))
    moved = [tuple(apart(x, 1, device) for x in state) for state in states]
    reduced = None if reduced is None else reduced.to(device)
    got = gather_amax(table_of(moved, device), len(columns), reduced, algorithm)
    assert_bitwise(got, torch.tensor(expected))


def test_no_states(device):
    table = table_of([], device)
    delayed_scaling_update(table, None, "max", 448.0, 0)
    assert gather_amax(table, 0).shape == (0,)


@pytest.mark.gpu
def test_many_states_and_graph_replay():
    def fresh():
        torch.manual_seed(0)
        return [(apart(torch.rand(64, 3), 0, "cuda"), torch.ones(3).cuda()) for _ in range(700)]

    eager, captured = fresh(), fresh()
    reduced = torch.rand(2100, device="cuda")
    tables = [table_of(states, "cuda") for states in (eager, captured)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        delayed_scaling_update(tables[1], reduced, "max", 448.0, 0)
    for _ in range(3):
        delayed_scaling_update(tables[0], reduced, "max", 448.0, 0)
        graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert_bitwise(a[0], b[0])
        assert_bitwise(a[1], b[1])


def test_as_library_operators(device):
    states = [(apart(torch.rand(4, 2), 0, device), torch.ones(2, device=device))]
    table = table_of(states, device)
    torch.ops.te.delayed_scaling_update(table, None, "max", 448.0, 0, None, None)
    assert states[0][0][0].tolist() == [0.0, 0.0]
    assert torch.ops.te.gather_amax(table, 2, None, "most_recent").tolist() == [0.0, 0.0]


TABLE = torch.zeros(0, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "int64 for the table", {"table": torch.zeros(0, 6)}),
        (ValueError, r"shape \(states, 6\) for the table, got \(0, 3\)", {"table": TABLE[:, :3]}),
        (ValueError, "0 elements for the reduced amax", {"reduced": torch.ones(3)}),
        (TypeError, "float32 for the reduced amax", {"reduced": torch.ones(0).double()}),
        (ValueError, "0 elements for the amax", {"amax": torch.ones(3)}),
        (TypeError, "float32 for the scale", {"scale": torch.ones(0).double()}),
        (ValueError, "a positive finite fp8_max", {"fp8_max": 0.0}),
        (ValueError, "a margin between -126 and 126, got 127", {"margin": 127}),
    ],
)
def test_errors(error, message, changed):
    args = {"table": TABLE, "reduced": None, "most_recent": False, "fp8_max": 448.0, "margin": 0}
    with pytest.raises(error, match=r"\[delayed_scaling_update\] expected " + message):
        _C.delayed_scaling_update(**(args | changed))


def test_unknown_algorithm():
    with pytest.raises(ValueError, match=r"expected 'max' or 'most_recent'.*got 'mean'"):
        delayed_scaling_update(TABLE, None, "mean", 448.0, 0)
    with pytest.raises(ValueError, match=r"\[gather_amax\] expected 'max'.*got 'mean'"):
        gather_amax(TABLE, 0, None, "mean")


def test_gather_needs_one_place_per_column():
    with pytest.raises(ValueError, match=r"\[gather_amax\] expected 0 elements for the output"):
        gather_amax(TABLE, 2)


@pytest.mark.parametrize("multiple", [0, 1025, 1 << 31])
def test_a_state_is_no_gigabyte(multiple):
    with pytest.raises(ValueError, match=r"\[spread\] expected a multiple of 1 to 1024, got"):
        spread(torch.ones(1), torch.zeros(4, 1), multiple)
