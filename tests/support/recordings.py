"""Finds the recordings that the chains of a module have made."""

import pytest
from torch import nn

from transformer_engine.pytorch.chain import recording
from transformer_engine.pytorch.chain.segment import Segment


def recordings_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that from now on gets an entry for each recording that is made."""
    made: list[int] = []
    record = recording.record
    monkeypatch.setattr(recording, "record", lambda *args: made.append(0) or record(*args))
    return made


def segments_of(module: nn.Module) -> list[Segment]:
    """Returns the segments of all plans and shapes, of a module's chain and of its fused chain."""
    owners = [module, *getattr(module, "_fused", {}).values()]
    plans = [plan for one in owners for plan in getattr(one, "_plans", {}).values()]
    return [one for plan in plans for found in (plan.recordings or {}).values() for one in found]


def all_recorded(module: nn.Module) -> bool:
    """Whether every recordable segment ran from a recording, in forward and backward."""
    found = [one for one in segments_of(module) if one.recordable]
    return bool(found) and all(
        one.recorded is not None
        and not any(isinstance(backward, str) for backward in one.backwards.values())
        for one in found
    )
