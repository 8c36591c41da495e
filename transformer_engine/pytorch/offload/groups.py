"""Groups of saved tensors that are copied to the host in the forward and back in the backward.

Whole storages are copied, each once, however many views of it are saved, because memory can be
freed only with the whole storage. Copies run on two side streams. The host never waits: the
computing stream waits for the copies of a group before the group's memory is freed, and before it
is needed again.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch


class CudaCopies:
    """Copies between CUDA devices and pinned memory, on two side streams.

    Copies return an event, for which the computing stream can `wait`. `outward` is the stream of
    the copies to the host; None makes one.
    """

    def __init__(self, outward: Any = None) -> None:
        self._outward = outward or torch.cuda.Stream()
        self._inward = torch.cuda.Stream()
        self._free: dict[int, list[torch.Tensor]] = {}

    def takes(self, x: torch.Tensor) -> bool:
        """Whether tensors of this device are copied: those on CUDA devices."""
        return x.is_cuda

    def out(self, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], object]:
        """Start copying bytes to the host; returns the copies and an event."""
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            hosts = [self._pinned(source.numel()) for source in sources]
            for host, source in zip(hosts, sources, strict=True):
                host.copy_(source, non_blocking=True)
            return hosts, self._outward.record_event()

    def back(
        self, sources: list[torch.Tensor], devices: list[torch.device]
    ) -> tuple[list[torch.Tensor], object]:
        """Start copying bytes back, into memory of the computing stream; see `out`."""
        found = [
            torch.empty(host.numel(), dtype=torch.uint8, device=device)
            for host, device in zip(sources, devices, strict=True)
        ]
        self._inward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._inward):
            for own, host in zip(found, sources, strict=True):
                own.copy_(host, non_blocking=True)
            return found, self._inward.record_event()

    def wait(self, event: Any) -> None:
        """Make the computing stream wait for an event."""
        torch.cuda.current_stream().wait_event(event)

    def free(self, host: torch.Tensor) -> None:
        """Keep pinned memory for the next step, because allocating it takes longer than a copy."""
        self._free.setdefault(host.numel(), []).append(host)

    def _pinned(self, size: int) -> torch.Tensor:
        free = self._free.get(size)
        return (
            free.pop()
            if free
            else torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        )


class Stored:
    """The storage of a tensor: on its device, on the host, or both."""

    def __init__(self, x: torch.Tensor, copies: CudaCopies) -> None:
        self.device = x.device
        self.bytes: torch.Tensor | None = _bytes(x)
        self.host: torch.Tensor | None = None
        self.size = self.bytes.numel()
        self.used = 0  # total bytes of the views that were saved
        self._copies = copies

    def drop_host(self) -> None:
        """Free the host memory: the bytes are on the device again, or no longer needed."""
        if self.host is not None:
            self._copies.free(self.host)
            self.host = None

    __del__ = drop_host


class View(NamedTuple):
    """The object that autograd saves in place of a tensor."""

    group: Group
    stored: Stored
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The tensor, on its device."""
        assert self.stored.bytes is not None
        storage = self.stored.bytes.untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=self.stored.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class Group:
    """The tensors that one layer saves; `index` counts the layers of the model."""

    def __init__(self, index: int, copies: CudaCopies) -> None:
        self.index = index
        self.entered = False  # the backward of the layer has begun
        self._copies = copies
        self._by_address: dict[int, Stored] = {}
        self._saved: list[tuple[torch.Tensor, int]] = []  # with the version that was saved
        self._stored: list[weakref.ref[Stored]] = []
        self._leaving: list[Stored] = []
        self._left: object = None  # event after the copies to the host
        self._coming: list[Stored] = []
        self._came: object = None  # event after the copies back

    def save(self, x: torch.Tensor) -> View:
        """Add a tensor to the group; returns the object to save in its place."""
        address = x.untyped_storage().data_ptr()
        stored = self._by_address.get(address)
        if stored is None:
            stored = self._by_address[address] = Stored(x, self._copies)
        stored.used += x.numel() * x.itemsize
        self._saved.append((x, x._version))
        return View(self, stored, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def keep(self) -> None:
        """Called after a layer that is not offloaded: its tensors stay on the device."""
        self._by_address, self._saved = {}, []

    def send(self) -> None:
        """Start copying what the layer saved; storages of which less than half was saved stay."""
        worth = [s for s in self._by_address.values() if 2 * s.used >= s.size]
        self._by_address = {}
        self._stored = [weakref.ref(stored) for stored in worth]
        if worth:
            hosts, self._left = self._copies.out([s.bytes for s in worth])  # type: ignore[misc]
            for stored, host in zip(worth, hosts, strict=True):
                stored.host = host
            self._leaving = worth

    def let_go(self) -> None:
        """Wait for the copies, and free the memory on the device.

        Raises:
            RuntimeError: a tensor was written to since it was saved.
        """
        if self.entered or not self._leaving:
            return
        for x, version in self._saved:
            if x._version != version:
                raise RuntimeError(
                    "[cpu_offload] expected tensors that are saved for the backward to stay as they"
                    f" are, got one of shape {tuple(x.shape)} that an in-place operation has"
                    f" changed (layer {self.index} of those that are offloaded)"
                )
        self._copies.wait(self._left)
        for stored in self._leaving:
            stored.bytes = None
        self._saved, self._leaving = [], []

    def bring_back(self) -> bool:
        """Start copying back what was freed and is still needed; returns whether there was any."""
        alive = [s for ref in self._stored if (s := ref()) is not None and s.bytes is None]
        self._stored = []
        if alive:
            found, self._came = self._copies.back(
                [s.host for s in alive],  # type: ignore[misc]
                [s.device for s in alive],
            )
            for stored, own in zip(alive, found, strict=True):
                stored.bytes = own
            self._coming = alive
        return bool(alive)

    def arrive(self) -> None:
        """Called when the saved tensors are needed: wait until they are on the device."""
        self.entered = True
        self.bring_back()
        self._saved, self._leaving = [], []
        if self._coming:
            self._copies.wait(self._came)
            for stored in self._coming:
                stored.drop_host()
            self._coming = []


def _bytes(x: torch.Tensor) -> torch.Tensor:
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
