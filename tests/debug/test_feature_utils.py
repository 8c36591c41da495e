"""Helpers of features. `next_enabled_iter` is compared with a list of iterations."""

import pytest
from debug_session import debugging

import nvdlfw_inspect.api as debug_api
from transformer_engine.debug.features.utils import get_reduction_params, next_enabled_iter
from transformer_engine.debug.pytorch.debug_state import TEDebugState

LAST = 40


@pytest.mark.parametrize("freq", [1, 3])
@pytest.mark.parametrize(
    ("start", "end", "intervals"),
    [
        (None, None, None),
        (5, 11, None),
        (5, -1, None),
        (0, 0, []),
        (1, 2, [(20, 24), (4, 9)]),
        (None, None, [(3, 5), (4, 12)]),
    ],
)
def test_every_iteration(start, end, intervals, freq) -> None:
    bounds = intervals or [(start or 0, end)]
    last = {None: LAST + freq, -1: LAST + freq}
    runs = [
        i
        for i in range(LAST + freq + 1)
        if i % freq == 0 and any(a <= i <= last.get(b, b) for a, b in bounds)
    ]
    for i in range(LAST):
        following = next((n for n in runs if n > i), None)
        assert next_enabled_iter(start, end, intervals, freq, i) == (i in runs, following)


def test_a_frequency_that_never_comes() -> None:
    with pytest.raises(ValueError, match="freq of 1 or more, got 0"):
        next_enabled_iter(0, 1, None, 0, 0)


@pytest.mark.parametrize(
    ("argument", "schedule"),
    [
        ("freq", (0, 1, None, 2.0)),
        ("start_step", (1.0, 1, None, 2)),
        ("end_step", (0, 3.0, None, 2)),
    ],
)
def test_what_is_no_integer_is_refused(argument: str, schedule: tuple) -> None:
    with pytest.raises(TypeError, match=f"expected {argument} as an integer, got float"):
        next_enabled_iter(*schedule, 3)


def test_how_statistics_are_reduced(tmp_path) -> None:
    tensor_parallel, stage = object(), object()
    with pytest.raises(ValueError, match="expected a running session"):
        get_reduction_params("activation", None, 1)
    with debugging(tmp_path):
        assert get_reduction_params("activation", tensor_parallel, 2) == (False, None, True)
        debug_api.DEBUG_MANAGER._tensor_reduction_group = stage
        for tensor in ("activation", "gradient", "output", "wgrad", "dgrad"):
            assert get_reduction_params(tensor, tensor_parallel, 2) == (False, stage, True)
        assert get_reduction_params("weight", tensor_parallel, 2) == (False, tensor_parallel, False)
        assert get_reduction_params("weight", tensor_parallel, 1) == (True, None, False)
        assert get_reduction_params("weight", None, 2) == (True, None, False)
        debug_api.DEBUG_MANAGER._tensor_reduction_group = None


def test_weights_that_are_not_reduced(tmp_path) -> None:
    tensor_parallel = object()
    TEDebugState.set_weight_tensor_tp_group_reduce(False)
    try:
        assert not TEDebugState.weight_tensor_tp_group_reduce
        with debugging(tmp_path):
            assert not debug_api.DEBUG_MANAGER.statistics.weights_over_tp_group
            assert get_reduction_params("weight", tensor_parallel, 2) == (True, None, False)
    finally:
        TEDebugState.set_weight_tensor_tp_group_reduce(True)
    assert TEDebugState.weight_tensor_tp_group_reduce
