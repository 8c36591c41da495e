"""The amax of a tensor that is sharded over ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from nvdlfw_inspect import api
from transformer_engine.pytorch.kernels.amax import amax
from transformer_engine.pytorch.parallel.agreement import differences, mismatch
from transformer_engine.pytorch.parallel.meeting import (
    Facts,
    Meeting,
    failures,
    group_or_world_size,
    ranks_of,
)

_PURPOSE = "amax"


class SharedAmax:
    """Reduces amaxes over process groups, for one session.

    Before the first reduction of a tensor, the ranks compare the description of the tensor, so that
    ranks that reduce different tensors get an error instead of a wrong amax.

    Args:
        config: digest of the configuration, which must be the same on all ranks.
    """

    def __init__(self, config: int) -> None:
        self._config = config
        self._began = failures()
        self._meetings: dict[Any, Meeting] = {}
        self._known: set[tuple[Any, str]] = set()

    def of(self, x: torch.Tensor, what: str, groups: tuple[Any, ...]) -> torch.Tensor:
        """Return the amax over all groups, fp32 `[1]`; all ranks of these groups must call.

        Args:
            x: fp32, fp16 or bf16, contiguous; may be empty on some ranks.
            what: a description of the tensor, the same on all ranks.
            groups: process groups to reduce over, in this order; empty: this rank alone.

        Raises:
            RuntimeError: the ranks reduce different tensors, or one did not call in time.
        """
        found = amax(x)
        for group in groups:
            if (group, what) not in self._known:
                self._meet(group, what)
            started = time.monotonic()
            try:
                dist.all_reduce(found, dist.ReduceOp.MAX, group)
            except RuntimeError as error:
                waited = time.monotonic() - started
                raise RuntimeError(self._meetings[group].failed(what, waited, error)) from error
        return found

    def _meet(self, group: Any, what: str) -> None:
        if group not in self._meetings:
            self._meetings[group] = Meeting(group, _PURPOSE, since=self._began)
        facts = {"config": self._config, "what": what}
        verdict = self._meetings[group].hold(facts, what, _judge)
        if verdict["error"]:
            raise RuntimeError(verdict["error"])
        self._known.add((group, what))


def _judge(posts: Mapping[int, Facts]) -> Facts:
    facts = {
        rank: {"the amax of": f"{said['what']} by configuration {said['config']:012x}"}
        for rank, said in posts.items()
    }
    text = differences(facts)
    return {"error": mismatch(_PURPOSE, text) if text else ""}


def groups_of(tensor: str, tp_group: Any, tp_size: int | None) -> tuple[Any, ...]:
    """Return the groups over which features that modify a tensor reduce its amax.

    These are the tensor parallel group of the layer and, except for weights, the reduction group if
    one was set. (The ranks of a reduction group have copies of a weight, with equal amaxes.) Groups
    of one rank are left out, and the tensor parallel group if the reduction group contains it.
    """
    wanted = []
    if tp_group is not None and (tp_size or 1) > 1:
        wanted.append(tp_group)
    manager: Any = api.DEBUG_MANAGER
    group = None if manager is None else manager._tensor_reduction_group
    if group is not None and tensor != "weight":
        wanted.append(group)
    wanted = [group for group in wanted if group_or_world_size(group) > 1]
    if len(wanted) == 2 and set(ranks_of(wanted[0])) <= set(ranks_of(wanted[1])):
        return tuple(wanted[1:])
    return tuple(wanted)
