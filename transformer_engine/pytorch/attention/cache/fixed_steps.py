"""Steps of generation whose `sequence_len_offset` is a tensor on the device.

The host never reads the offset, so every step has the same shapes and addresses. Attention takes
the whole cache, with lengths on the device that hide what is not written yet. One CUDA graph serves
all steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention.cache.memory import outside_of_inference_mode
from transformer_engine.pytorch.attention.core.call import Sequences
from transformer_engine.pytorch.capture import is_capturing, memoize


class FixedStep(NamedTuple):
    """Where the new tokens of a step belong.

    Attributes:
        starts: int32 `[batch]`, tokens of each sequence before this step.
        rows: int64 `[new tokens]`, the row of each in a cache of `[max_sequence_length *
            max_batch_size, heads, size]`; the tokens are in the order of their format.
        query_sequences: lengths of the queries.
        key_sequences: lengths of keys and values, the new tokens included.
    """

    starts: torch.Tensor
    rows: torch.Tensor
    query_sequences: Sequences
    key_sequences: Sequences


class Geometry(NamedTuple):
    """Sizes of a step and of the cache."""

    tokens: int
    batch: int
    sequence_first: bool
    first_sequence: int
    max_tokens: int
    max_batch: int


class FixedSteps:
    """Makes the tensors of a step once, for all layers.

    A new step begins when the offset has changed, and when a layer asks a second time, because each
    layer asks once in a step. Tensors that are made while a CUDA graph is captured are not used
    outside of it, because replays write them; and a capture uses none from outside, because its
    replays must compute them from the current offset.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._served: set[object] = set()
        self._step: FixedStep | None = None

    def step(self, who: object, offset: torch.Tensor, geometry: Geometry) -> FixedStep:
        """The step at an offset.

        Args:
            who: identifies the caller, who asks once in a step.
            offset: tokens before the step: `[]` for all sequences alike, or `[batch]`.
            geometry: sizes.

        Raises:
            ValueError: an offset of another shape, or (checked on the CPU only) without room for
                the step behind it.
            TypeError: an offset that is not of integers.
        """
        version = None if offset.is_inference() else offset._version
        key = (offset.data_ptr(), version, geometry, is_capturing())
        if self._step is None or key != self._key or who in self._served:
            _check(offset, geometry)
            with outside_of_inference_mode():  # memoised rows may be used in training later
                self._step, self._key = _step(offset, geometry), key
            self._served.clear()
        self._served.add(who)
        return self._step


def _check(offset: torch.Tensor, geometry: Geometry) -> None:
    if offset.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            "[InferenceParams] expected sequence_len_offset to be an int, or a tensor of int32 or"
            f" int64, got one of {offset.dtype}"
        )
    if tuple(offset.shape) not in ((), (geometry.batch,)):
        raise ValueError(
            f"[InferenceParams] expected sequence_len_offset of shape () or ({geometry.batch},),"
            f" the sequences of the step, got {tuple(offset.shape)}"
        )
    first, last = geometry.first_sequence, geometry.first_sequence + geometry.batch
    if first < 0 or last > geometry.max_batch:
        raise ValueError(
            f"[InferenceParams] KV cache overflow: expected at most {geometry.max_batch}"
            f" sequences, got those from {first} to {last}"
        )
    if geometry.tokens > geometry.max_tokens:
        raise ValueError(
            f"[InferenceParams] KV cache overflow: expected at most {geometry.max_tokens} tokens,"
            f" got {geometry.tokens}"
        )
    if offset.device.type != "cpu":  # elsewhere the host would wait for the device
        return
    first, last = (int(one) for one in offset.aminmax())
    if first < 0 or last + geometry.tokens > geometry.max_tokens:
        raise ValueError(
            f"[InferenceParams] KV cache overflow: expected at most {geometry.max_tokens} tokens,"
            f" got {geometry.tokens} behind a sequence_len_offset of {first if first < 0 else last}"
        )


def _step(offset: torch.Tensor, geometry: Geometry) -> FixedStep:
    tokens, batch, sequence_first, _, max_tokens, max_batch = geometry
    rows, ends = _at_the_beginning(geometry, offset.device)
    # If an offset on the device is too large, its sequence overwrites its own last tokens only.
    starts = offset.clamp(0, max_tokens - tokens).to(torch.int32).expand(batch).contiguous()
    of_sequence = starts if sequence_first else starts[:, None]
    before = starts.new_zeros(batch + 1)
    torch.cumsum(starts, 0, dtype=torch.int32, out=before[1:])
    return FixedStep(
        starts,
        torch.add(rows, of_sequence, alpha=max_batch).flatten(),
        Sequences(ends, longest=tokens),
        Sequences(ends + before, longest=max_tokens),
    )


@memoize
def _at_the_beginning(
    geometry: Geometry, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and ends of the new tokens of a step at offset 0."""
    place = torch.arange(geometry.tokens, device=device) * geometry.max_batch
    sequence = torch.arange(geometry.batch, device=device) + geometry.first_sequence
    sides = (place[:, None], sequence) if geometry.sequence_first else (sequence[:, None], place)
    ends = torch.arange(geometry.batch + 1, dtype=torch.int32, device=device) * geometry.tokens
    return sides[0] + sides[1], ends
