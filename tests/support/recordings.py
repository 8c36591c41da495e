"""What chains of modules have recorded."""

from torch import nn

from transformer_engine.pytorch.chain.segment import Segment


def segments_of(module: nn.Module) -> list[Segment]:
    """Of every plan and every shape of a module's own chain, and of a layer's that is one node."""
    owners = [module, *getattr(module, "_fused", {}).values()]
    plans = [plan for one in owners for plan in getattr(one, "_plans", {}).values()]
    return [one for plan in plans for found in (plan.recordings or {}).values() for one in found]


def all_recorded(module: nn.Module) -> bool:
    """Every call that may be recorded ran from a recording, and so did every backward."""
    found = [one for one in segments_of(module) if one.recordable]
    return bool(found) and all(
        one.recorded is not None
        and not any(isinstance(backward, str) for backward in one.backwards.values())
        for one in found
    )
