"""Work beside the caller's stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def on_stream(stream: Any, *tensors: torch.Tensor) -> Iterator[None]:
    """Run on a stream after the work of the current one, and keep these tensors until it is done.

    Without a stream, run on the current one.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    for x in tensors:
        x.record_stream(stream)
