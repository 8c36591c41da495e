"""Process groups that users hand over."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def check_group(op: str, argument: str, group: Any, layer: str | None = None) -> None:
    """Raise TypeError unless this is a process group, None, or torch's mark of a non-member."""
    if group is None or not dist.is_available():
        return
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    where = f" (layer {layer})" if layer else ""
    raise TypeError(
        f"[{op}] expected {argument} to be a process group of torch.distributed or None, got "
        f"{group!r}{where}"
    )
