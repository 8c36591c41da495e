"""Memory that all ranks of a group map, if they are on one host.

On GPUs it is torch's symmetric memory. On CPUs it is a file whose name is deleted once all ranks
have opened it. Each rank locks one byte of the file. The lock ends with the process of the rank, so
that other ranks, which wait for it, can find out.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transformer_engine import _C
from transformer_engine.pytorch._torch_private import symmetric_memory

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_IN_MEMORY = Path("/dev/shm")


class MappedMemory(NamedTuple):
    """Memory of one rank, which the others map.

    Attributes:
        own: uint8, the memory of this rank, zeroed.
        addresses: the addresses in this process of the memory of each rank.
        lock_file: on CPUs the descriptor of the file, in which rank r has locked byte r; else -1.
        held: objects that keep the memory mapped.
    """

    own: torch.Tensor
    addresses: Sequence[int]
    lock_file: int
    held: Any


def map_memory(group: Any, device: torch.device, size: int) -> MappedMemory | None:
    """Map memory; None on all ranks if some rank cannot map the memory of another.

    All ranks must call this, each for memory of `size` bytes on its device. On GPUs it waits for
    the device.
    """
    found = _among_gpus(group, device, size) if device.type == "cuda" else _in_file(group, size)
    if found is not None:
        found.own.zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found if all(_from_all(group, found is not None)) else None


def _from_all(group: Any, own: Any) -> list[Any]:
    """The objects of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    return everyone


def _host() -> tuple[str, str]:
    """Equal only for processes on one host; the boot id differs where hosts have the same name."""
    return socket.gethostname(), _BOOT_ID.read_text() if _BOOT_ID.exists() else ""


def _among_gpus(group: Any, device: torch.device, size: int) -> MappedMemory | None:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    able = symmetric_memory is not None and _C.built_with_cuda()
    said = _from_all(group, (_host(), uuid, able))
    hosts, gpus, ability = zip(*said, strict=True)
    reaches = _reaches(device, set(gpus))
    if not (all(ability) and len(set(hosts)) == 1 and len(set(gpus)) == len(gpus)):
        return None
    if not all(_from_all(group, reaches)):
        return None
    own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    try:
        handle = symmetric_memory.rendezvous(own, group.group_name)
    except RuntimeError:  # for example, a container that does not allow to share file descriptors
        return None
    views = [handle.get_buffer(r, (size,), torch.uint8) for r in range(len(gpus))]
    return MappedMemory(own, [view.data_ptr() for view in views], -1, views)


def _reaches(device: torch.device, uuids: set[str]) -> bool:
    """Whether a GPU can access those of the other ranks that are visible to this process."""
    for index in range(torch.cuda.device_count()):
        other = str(torch.cuda.get_device_properties(index).uuid)
        asked = index != device.index and other in uuids
        if asked and not torch.cuda.can_device_access_peer(device, index):
            return False
    return True


def _in_file(group: Any, size: int) -> MappedMemory | None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    path = _new_file(ranks * size) if rank == 0 else ""
    said = _from_all(group, (_host(), os.getpid(), path))
    hosts, processes, paths = zip(*said, strict=True)
    lock_file = -1
    if paths[0] and len(set(hosts)) == 1 and len(set(processes)) == ranks:
        with contextlib.suppress(OSError):  # for example, in another container
            lock_file = os.open(paths[0], os.O_RDWR)
    mapped = _from_all(group, lock_file >= 0)
    if path:
        Path(path).unlink()
    if lock_file < 0 or not all(mapped):
        return None
    fcntl.lockf(lock_file, fcntl.LOCK_EX, 1, rank)
    whole = torch.frombuffer(mmap.mmap(lock_file, ranks * size), dtype=torch.uint8)
    weakref.finalize(whole, os.close, lock_file)
    addresses = [whole.data_ptr() + size * r for r in range(ranks)]
    return MappedMemory(whole[size * rank : size * (rank + 1)], addresses, lock_file, whole)


def _new_file(size: int) -> str:
    """The path of a new file of this size; "" if there is no room for it."""
    folder = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    try:
        handle, path = tempfile.mkstemp(prefix="te-", dir=folder)
    except OSError:
        return ""
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError:
        Path(path).unlink()
        return ""
    finally:
        os.close(handle)
    return path
