"""The collectives and bytes that tensor parallel layers have sent, by layer and dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from transformer_engine.pytorch.chain.user_buffers import UserBuffers
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.parallel.overlap import Overlap


class Sent(NamedTuple):
    """A kind of collective.

    Attributes:
        layer: name of the layer that calls it.
        collective: `all-reduce`, `all-gather` or `reduce-scatter`.
        direction: `forward` or `backward`.
        kind: `fp8`, or the dtype of the tensor that is sent.
        overlapped: a GEMM runs at the same time.
    """

    layer: str
    collective: str
    direction: str
    kind: str
    overlapped: bool


def count_sent(sent: Sent, x: torch.Tensor) -> None:
    """Count a collective to which this rank brings `x`. Compiled code counts nothing."""
    if not torch.compiler.is_compiling():
        process_state().sent.add((sent, x.nbytes))


@dataclass(frozen=True)
class ParallelReport:
    """Collectives of layers so far, in eager mode.

    Attributes:
        counts: calls, and bytes that this rank brought to them, by kind.
        asked: for each layer that has run, which collectives its `ub_*` arguments ask to overlap.

    >>> sent = Sent("fc1", "all-gather", "forward", "fp8", overlapped=False)
    >>> ParallelReport({sent: (1, 4096)}).bytes("fp8")
    4096
    """

    counts: dict[Sent, tuple[int, int]]
    asked: dict[str, Overlap] = field(default_factory=dict)

    def bytes(self, kind: str | None = None) -> int:
        """The number of bytes sent as `fp8`, `bfloat16`, ..., or in all."""
        return sum(size for sent, (_, size) in self.counts.items() if kind in (None, sent.kind))

    def __str__(self) -> str:
        kinds = sorted({sent.kind for sent in self.counts})
        told = ", ".join(f"{self.bytes(kind)} bytes {kind}" for kind in kinds)
        lines = [f"collectives: {told or 'none'}"]
        for sent, (calls, size) in self.counts.items():
            under = "  under a GEMM" if sent.overlapped else ""
            lines.append(
                f"  {sent.layer}  {sent.direction:<8}  {sent.collective:<14}  {sent.kind:<8}"
                f"  {calls:>6} calls  {size:>12} bytes{under}"
            )
        lines += [f"  {layer}  asks for overlap: {over}" for layer, over in self.asked.items()]
        return "\n".join(lines)


def parallel_report(reset: bool = False) -> ParallelReport:
    """What tensor parallel layers have sent since the start (or the last reset).

    Args:
        reset: start counting anew.

    >>> import transformer_engine.pytorch as te
    >>> te.parallel_report().bytes() >= 0
    True
    """
    counts: dict[Sent, tuple[int, int]] = {}
    for (sent, size), times in process_state().sent.totals(reset).items():
        calls, bytes_so_far = counts.get(sent, (0, 0))
        counts[sent] = (calls + times, bytes_so_far + size * times)
    buffers: UserBuffers | None = process_state().user_buffers
    return ParallelReport(counts, {} if buffers is None else dict(buffers.layers))
