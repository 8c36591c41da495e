"""Meetings: ranks compare on their hosts what they are about to do together.

A collective that ranks call with different arguments hangs or mixes up data. So ranks meet before
the first collective of each kind: every rank posts its facts in the key-value store of
torch.distributed, the first rank of the group compares them and posts a verdict, and all ranks read
the verdict. No device waits, and later collectives cost nothing. If a rank does not come, the
others name it after the timeout of the group.

The facts could not be compared by a collective: if one rank skipped that collective, it would be
matched with the next one that the rank calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from transformer_engine.pytorch._torch_private import default_store, group_timeout

Facts = Mapping[str, Any]  # values that JSON can hold
Judge = Callable[[Mapping[int, Facts]], Facts]  # facts by rank to a verdict

_GRACE = timedelta(seconds=3)  # other ranks wait this much longer for the first rank's verdict
_MOST_NAMED = 3
_FAILURES = "te/failures"  # how many meetings of any ranks have failed
OF_THE_DEBUGGER = (
    "initialize the debugger with one configuration, run the same layers, and call"
    " debug_api.step() equally often"
)


def group_or_world_size(group: Any) -> int:
    """The number of ranks of a group, or of all for None; 1 on ranks that are not in the group."""
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


def failures() -> int:
    """How many meetings have failed so far, on any ranks; 0 before torch.distributed starts."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
        return 0
    store: Any = default_store()
    return 0 if store is None else int(store.add(_FAILURES, 0))


class Meeting:
    """Meetings of the ranks of a group. The n-th meeting of one rank is the n-th of all others.

    With torch's fake backend, which has no store, each rank meets alone.

    Args:
        group: process group; None is all ranks.
        purpose: meetings are counted separately for each purpose and set of ranks.
        op: the module or function that messages name; if empty, they name the purpose.
        advice: what all ranks must do, for messages about ranks that did not come.
        since: the value of `failures` when the activity that meetings are about began. This rank
            skips meetings that had failed before that time.
    """

    def __init__(
        self,
        group: Any,
        purpose: str,
        op: str = "",
        advice: str = OF_THE_DEBUGGER,
        since: int = 0,
    ) -> None:
        self._op, self._advice = op or purpose, advice
        self.ranks = ranks_of(group)
        self.timeout: timedelta = group_timeout(group)
        self._grace = min(_GRACE, self.timeout)
        self._purpose = f"{purpose} {self.ranks}"
        self._rank = dist.get_rank()
        store: Any = None if dist.get_backend(group) == "fake" else default_store()
        self._store = store
        self._held = False  # this rank has been in a meeting
        self._told = False  # this rank has posted a failure
        self._count = f"te/{self._purpose}/{self._rank}/count"
        self._number = 0 if store is None else store.add(self._count, 0)
        while since and 0 < self._missed().get("failure", 0) <= since:
            self._number = store.add(self._count, 1)

    def hold(self, facts: Facts, doing: str, judge: Judge) -> Facts:
        """Hold a meeting; every rank of the group must call this.

        Args:
            facts: the facts of this rank.
            doing: what this rank is about to do, in words: "step() of iteration 3".
            judge: called on the first rank with the facts of all. All ranks return its result.

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
            self._store.set(verdict, json.dumps(self._given_up(doing, self.ranks[:1])))
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
            return self._given_up(doing, absent)
        for rank in self.ranks:
            self._store.delete_key(self._key("facts", rank))
        # All ranks have come to this meeting, so all have read the previous verdict.
        self._store.delete_key(self._key("verdict", self.ranks[0], self._number - 1))
        return judge(posts)

    def _given_up(self, doing: str, absent: Iterable[int]) -> Facts:
        failure = self._store.add(_FAILURES, 1)
        return {"absence": self._absence(doing, absent), "failure": failure}

    def _missed(self) -> Facts:
        """The verdict of the next meeting, if other ranks have given up waiting for this one."""
        verdict = self._key("verdict", self.ranks[0], self._number + 1)
        if self._store is None or not self._store.check([verdict]):
            return {}
        return json.loads(self._store.get(verdict))

    def _absence(self, doing: str, absent: Iterable[int]) -> str:
        waited = f"{self.timeout.total_seconds():g} s"
        return (
            f"[{self._op}] expected {listed(self.ranks)} to meet in {doing}, but {listed(absent)}"
            f" did not come within {waited}: all ranks of a group must {self._advice}"
        )

    def failed(self, doing: str, seconds: float, error: object) -> str:
        """The message about a failed collective: which ranks are stuck, and which are absent.

        This rank has waited for `seconds`, and `error` is torch's message; for `doing` see `hold`.
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
        """The message of ranks that have given up waiting for this one; "" if there are none."""
        failed, store = self._key("failed", -1), self._store
        try:
            if store is None or self._told:
                return ""
            if self._held and store.check([failed]):
                return f"[{self._op}] {store.get(failed).decode()}, and gave up"
            absence: str = self._missed().get("absence", "")
            if absence:
                self._number = store.add(self._count, 1)
        except RuntimeError:  # the rank that had the store is gone
            return ""
        return absence

    def _key(self, what: str, rank: int, number: int | None = None) -> str:
        return f"te/{self._purpose}/{self._number if number is None else number}/{what}/{rank}"

    def _wait(self, key: str, timeout: timedelta) -> bool:
        try:
            self._store.wait([key], timeout)
        except RuntimeError:  # DistStoreError in some stores
            return False
        return True
