"""Ranks meet on their hosts to compare what they are about to do together.

A collective in which ranks disagree hangs, or mixes what does not belong together. So ranks meet
before the first one of a structure, through the key-value store of torch.distributed: each posts
its facts, the first rank of the group compares them and posts a verdict, which all ranks read. No
device waits, and nothing is paid afterwards. Who does not come is named when the group's timeout is
over. The store it is because a collective that others do not join would be taken for the next one
that they do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from transformer_engine.pytorch._torch_private import default_store, group_timeout

Facts = Mapping[str, Any]  # of JSON
Judge = Callable[[Mapping[int, Facts]], Facts]  # facts by rank to a verdict

_GRACE = timedelta(seconds=3)  # at most, after a timeout: to be told who did not come
_MOST_NAMED = 3
OF_THE_DEBUGGER = (
    "initialize the debugger with one configuration, run the same layers, and call"
    " debug_api.step() equally often"
)


def group_size(group: Any) -> int:
    """The number of ranks of a group, None being all; 1 for ranks that are not in it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(group) < 0:
        return 1
    return dist.get_world_size(group)


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group, None being all."""
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> listed([0]), listed([1, 4])
    ('rank 0', 'ranks 1, 4')
    """
    text = ", ".join(map(str, ranks))
    return f"ranks {text}" if "," in text else f"rank {text}"


class Meeting:
    """Meetings of the ranks of a group. The n-th of one rank is with the n-th of the others.

    Without a store that ranks share (torch's fake backend) everybody meets themselves alone.

    Args:
        group: process group; None is all ranks.
        purpose: what they are about; each purpose is counted by itself.
        op: in messages; the purpose where it is empty.
        advice: what all ranks must do, for those that some have waited for in vain.
    """

    def __init__(
        self, group: Any, purpose: str, op: str = "", advice: str = OF_THE_DEBUGGER
    ) -> None:
        self._op, self._advice = op or purpose, advice
        self.ranks = ranks_of(group)
        self.timeout: timedelta = group_timeout(group)
        self._grace = min(_GRACE, self.timeout)
        self._purpose = purpose
        self._rank = dist.get_rank()
        self._store: Any = None if dist.get_backend(group) == "fake" else default_store()
        self._held = self._told = False  # a meeting; of a failure
        self._count = f"te/{purpose}/{self._rank}/count"
        self._number = 0 if self._store is None else self._store.add(self._count, 0)

    def hold(self, facts: Facts, doing: str, judge: Judge) -> Facts:
        """Compare facts; every rank of the group must come.

        Args:
            facts: of this rank.
            doing: what it does, in words: "step() of iteration 3".
            judge: run by the first rank; what it returns is returned on all ranks.

        Raises:
            RuntimeError: a rank did not come within the group's timeout.
        """
        if self._store is None:
            return judge({self._rank: facts})
        self._held, self._number = True, self._store.add(self._count, 1)
        self._store.set(self._key("facts", self._rank), json.dumps([doing, facts]))
        verdict = self._key("verdict", self.ranks[0])
        if self._rank == self.ranks[0]:
            judged = self._judged(doing, judge)
            if not self._store.check([verdict]):  # nobody has given up
                self._store.set(verdict, json.dumps(judged))
        elif not self._wait(verdict, self.timeout + self._grace):
            self._store.set(verdict, json.dumps({"absence": self._absence(doing, self.ranks[:1])}))
        found: Facts = json.loads(self._store.get(verdict))
        if "absence" in found:
            raise RuntimeError(found["absence"])
        return found

    def _judged(self, doing: str, judge: Judge) -> Facts:
        posts: dict[int, Facts] = {}
        deadline = time.monotonic() + self.timeout.total_seconds()
        for rank in self.ranks:
            left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
            if self._wait(self._key("facts", rank), left):
                posts[rank] = json.loads(self._store.get(self._key("facts", rank)))[1]
        absent = [rank for rank in self.ranks if rank not in posts]
        if absent:
            return {"absence": self._absence(doing, absent)}
        for rank in self.ranks:
            self._store.delete_key(self._key("facts", rank))
        # All who are here have read the verdict before.
        self._store.delete_key(self._key("verdict", self.ranks[0], self._number - 1))
        return judge(posts)

    def _absence(self, doing: str, absent: Iterable[int]) -> str:
        waited = f"{self.timeout.total_seconds():g} s"
        return (
            f"[{self._op}] expected {listed(self.ranks)} to meet in {doing}, but {listed(absent)}"
            f" did not come within {waited}: all ranks of a group must {self._advice}"
        )

    def failed(self, doing: str, seconds: float, error: object) -> str:
        """What to say of a collective that has failed: who else is stuck, and who did not come.

        Args:
            doing: see `hold`.
            seconds: that this rank has waited.
            error: what torch says.
        """
        text = f"[{self._op}] a collective of {listed(self.ranks)} failed in {doing}: {error}"
        try:
            found = self._stuck(doing)
        except RuntimeError:
            return f"{text}; the rank that has the store of torch.distributed has ended"
        absent = [rank for rank in self.ranks if rank not in found]
        if absent and seconds >= 0.8 * self.timeout.total_seconds():
            return self._absence(doing, absent)
        if absent:
            return f"{text}; {listed(absent)} did not say so: ended, or waiting for others"
        said = [f"rank {rank} in {where}" for rank, where in found.items() if where != doing]
        return f"{text}, on all of them; {', '.join(said[:_MOST_NAMED]) or 'all were there'}"

    def _stuck(self, doing: str) -> dict[int, str]:
        if self._store is None:
            return {self._rank: doing}
        self._store.set(self._key("failed", self._rank), doing)
        self._store.set(self._key("failed", -1), f"rank {self._rank} waits in {doing}")
        keys = {rank: self._key("failed", rank) for rank in self.ranks}
        deadline = time.monotonic() + self._grace.total_seconds()
        while time.monotonic() < deadline and not self._store.check([*keys.values()]):
            time.sleep(0.05)
        here = {rank: key for rank, key in keys.items() if self._store.check([key])}
        self._told = True
        return {rank: self._store.get(key).decode() for rank, key in here.items()}

    def abandoned(self) -> str:
        """What ranks have said that waited for this one in vain; "" where none has."""
        failed, store = self._key("failed", -1), self._store
        try:
            if store is None or self._told:
                return ""
            if self._held and store.check([failed]):
                return f"[{self._op}] {store.get(failed).decode()}, and gave up"
            self._number += 1  # the meeting that others may have begun
            verdict = self._key("verdict", self.ranks[0])
            if not store.check([verdict]):
                return ""
            store.add(self._count, 1)
            found = json.loads(store.get(verdict))
        except RuntimeError:  # the rank that had the store is gone
            return ""
        absence: str = found.get("absence", "")
        return absence

    def _key(self, what: str, rank: int, number: int | None = None) -> str:
        return f"te/{self._purpose}/{self._number if number is None else number}/{what}/{rank}"

    def _wait(self, key: str, timeout: timedelta) -> bool:
        try:
            self._store.wait([key], timeout)
        except RuntimeError:  # DistStoreError in some stores
            return False
        return True
