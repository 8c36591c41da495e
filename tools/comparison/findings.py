"""The findings of a case: fingerprints of tensors, numbers and texts, by name."""

from __future__ import annotations

import ctypes
import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import transformer_engine.pytorch as te

Entry = dict[str, Any]
# The parts of FP8 tensors, under the attribute names that checkpoints and optimizers read.
PARTS = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")


class Findings:
    """Entries by name, in the order in which they were found.

    The entry of a tensor has the keys `sha256`, `dtype`, `shape` and `norm` (the norm is for the
    reader only and is not compared). The entry of another value has the key `value`.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a tensor, a number, bytes, or all elements of a tuple, list or mapping.

        Args:
            name: name of the entry; for elements, the index or key is appended.
            value: the value.
        """
        if isinstance(value, te.QuantizedTensor):
            self._put(name, _of_tensor(value.dequantize()))
            parts = {part: getattr(value, part, None) for part in PARTS}
            self.add(name, {part: x for part, x in parts.items() if isinstance(x, torch.Tensor)})
        elif isinstance(value, torch.Tensor):
            self._put(name, _of_tensor(value))
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self.add(f"{name}.{key}", part)
        elif isinstance(value, (tuple, list)):
            for place, part in enumerate(value):
                self.add(f"{name}.{place}", part)
        elif isinstance(value, (bytes, io.BytesIO)):
            data = value if isinstance(value, bytes) else value.getvalue()
            self._put(name, _entry(data, "bytes", [len(data)]))
        else:
            self._put(name, {"value": repr(value)})

    def add_text(self, name: str, text: str) -> None:
        """Add a text.

        Args:
            name: name of the entry.
            text: the text, which is compared as a whole; the number of lines counts as shape.
        """
        self._put(name, _entry(text.encode(), "text", [text.count("\n")]))

    def fail(self, error: Exception) -> None:
        """Add the error with which the case ended."""
        self._put("error", {"value": f"{type(error).__name__}: {error}"})

    def _put(self, name: str, entry: Entry) -> None:
        if name in self.entries:
            raise KeyError(f"two findings have the name {name}")
        self.entries[name] = entry


def _entry(data: bytes, dtype: str, shape: list[int]) -> Entry:
    return {"sha256": hashlib.sha256(data).hexdigest(), "dtype": dtype, "shape": shape}


def _of_tensor(x: torch.Tensor) -> Entry:
    x = x.detach().cpu().contiguous()
    data = ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
    entry = _entry(data, str(x.dtype).removeprefix("torch."), list(x.shape))
    entry["norm"] = f"{float(x.double().norm()):.8g}"
    return entry


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a value that may be a tensor, a tuple, list or mapping, or none of these."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
