"""`Counter`, which counts events for reports."""

import sys
import threading

import pytest

from transformer_engine.pytorch.fp8.counter import Counter


class CountsThatAddAGroup(dict):
    """Counts of a group that add another group when they are read, as another thread may do."""

    counter: Counter

    def items(self):
        self.counter.group({f"later {len(self.counter._groups)}": 1})
        return super().items()


def test_totals_while_a_group_is_added():
    counter = Counter()
    CountsThatAddAGroup.counter = counter
    group = counter.group({"gemm": 2})
    group.counts = CountsThatAddAGroup(group.counts)
    group.add()
    counter.add("gemm")
    assert counter.totals(reset=True) == {"gemm": 3}
    assert counter.totals() == {}


@pytest.fixture
def _frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_frequent_switches")
def test_all_threads_count():
    counter, number = Counter(), 20_000
    group = counter.group({"gemm": 2})

    def count() -> None:
        for _ in range(number):
            counter.add("gemm")
            group.add()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.totals(reset=True) == {"gemm": 12 * number}
    assert counter.totals() == {}
