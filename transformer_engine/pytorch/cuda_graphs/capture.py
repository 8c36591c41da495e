"""How callables are captured into CUDA graphs: settings, and errors that name the callable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from transformer_engine.pytorch.cuda_graphs.subject import Subject
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.process_state import Scope


@dataclass(frozen=True)
class Settings:
    """How callables are captured; see `make_graphed_callables`."""

    scope: Scope
    warmup: int
    allow_unused: bool
    pool: Any
    stream: Any
    caches_weights: bool
    retain_graph: bool
    clones_gradients: bool


@contextmanager
def capture_into(
    settings: Settings, subject: Subject, what: str, graph: torch.cuda.CUDAGraph
) -> Iterator[None]:
    """Capture into a graph; errors name the callable.

    Raises:
        RuntimeError: what runs inside cannot be captured.
    """
    for tracker in subject.trackers():
        tracker.register_with(graph)
    # After a failed capture, torch.cuda.graph leaves its own stream as the current one.
    with torch.cuda.stream(torch.cuda.current_stream()):
        yield from _captured(settings, subject, what, graph)


def _captured(
    settings: Settings, subject: Subject, what: str, graph: torch.cuda.CUDAGraph
) -> Iterator[None]:
    first: Exception | None = None
    try:
        with (
            torch.cuda.graph(graph, pool=settings.pool, stream=settings.stream),
            autocast_stack().resumed(settings.scope),
        ):
            try:
                yield
            except Exception as error:
                first = error  # the end of the capture will raise another one, which says less
                raise
    except Exception as error:
        cause = first or error
        with suppress(Exception):  # the first error is the one to report
            _end_failed_capture(subject)
        raise RuntimeError(
            f"[make_graphed_callables] the {what} of {subject.where} cannot be captured:"
            f" {type(cause).__name__}: {cause} (what waits for the device, as .item(), .cpu() or"
            " print of a tensor does, has no place in a graph)"
        ) from cause


def _end_failed_capture(subject: Subject) -> None:
    """Make an empty capture, which resets torch's generators after a failed one."""
    graph = torch.cuda.CUDAGraph()
    for tracker in subject.trackers():
        tracker.register_with(graph)
    x = torch.zeros((), device="cuda")
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        x.add_(1)


def capture_weights(subject: Subject, settings: Settings) -> None:
    """Capture the casts of cached weights, which forwards with `is_first_microbatch=False` read.

    The graph replays between the forward and the backward of other graphs, so it must not share
    memory with them.
    """
    subject.weights = torch.cuda.CUDAGraph()
    own = replace(settings, pool=torch.cuda.graph_pool_handle())
    with capture_into(own, subject, "cast of weights", subject.weights):
        renewed = [(module, i) for module in subject.ours for i in module.renew_weights()]
    subject.cached_weights = [(m, i, m.chain.matmuls[i].cached_weight) for m, i in renewed]
