"""`next_enabled_iter` compared with a list of the iterations in which a schedule runs."""

import pytest

from transformer_engine.debug.features.utils import next_enabled_iter

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
