"""`Counter`, which counts events for reports."""

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
