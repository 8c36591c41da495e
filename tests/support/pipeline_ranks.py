"""What each rank of distributed/test_pipeline runs: one stage of a pipeline.

For comparison, one process runs both stages in the same order and passes tensors instead of
messages.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from rank_device import here
from replica_reference import BATCH, HIDDEN, RECIPES, TOKENS, alone, differences, loss_of, make
from torch import nn

import transformer_engine.pytorch as te

MICRO_BATCHES, STEPS = 4, 2
# Work of each stage in a step (F: forward, B: backward). The first stage is one forward ahead.
FIRST = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
LAST = ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


class _Stage:
    """A layer, its optimizer, and the micro-batches whose backward has not run."""

    def __init__(self, number: int, precision: str, group: Any) -> None:
        self.model = make("TransformerLayer", seed=number + 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recipe, self.group, self.last = RECIPES[precision], group, number == 1
        self.running: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, micro_batch: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the output for the next stage; the last stage returns the loss."""
        x = x.detach().requires_grad_()
        with te.autocast(
            self.recipe is not None, recipe=self.recipe, amax_reduction_group=self.group
        ):
            y = self.model(x, is_first_microbatch=micro_batch == 0)
        result = loss_of(y) if self.last else y
        self.running[micro_batch] = x, result
        return result.detach()

    def backward(self, micro_batch: int, grad: torch.Tensor | None) -> torch.Tensor:
        """Returns the gradient for the previous stage."""
        x, result = self.running.pop(micro_batch)
        result.backward(grad)
        assert x.grad is not None
        return x.grad

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _input(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + micro_batch)
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).bfloat16()
    return (micro_batch + 1) * x.to(here())


def _received(source: int) -> torch.Tensor:
    message = torch.empty(TOKENS, BATCH, HIDDEN, dtype=torch.bfloat16, device=here())
    dist.recv(message, source)
    return message


def _stage_of_rank(rank: int, stage: _Stage) -> list[float]:
    """Runs a stage on this rank; only the last stage has losses."""
    losses, pending = [], []
    for step in range(STEPS):
        for kind, micro_batch in ((one[0], int(one[1])) for one in (FIRST, LAST)[rank]):
            if kind == "F":
                x = _input(step, micro_batch) if rank == 0 else _received(0)
                y = stage.forward(micro_batch, x)
                if rank == 0:
                    pending.append((dist.isend(y, 1), y))
                else:
                    losses.append(y.item())
            else:
                grad = stage.backward(micro_batch, _received(1) if rank == 0 else None)
                if rank == 1:
                    pending.append((dist.isend(grad, 0), grad))
        stage.step()
    for work, _ in pending:
        work.wait()
    return losses


def _in_turn() -> Iterator[tuple[int, str, int]]:
    """Yields (stage, kind, micro-batch) of both stages, in an order that messages allow."""
    yield 0, "F", 0
    for i in range(MICRO_BATCHES):
        if i + 1 < MICRO_BATCHES:
            yield 0, "F", i + 1
        yield 1, "F", i
        yield 1, "B", i
        yield 0, "B", i


def _one_process(stages: list[_Stage]) -> list[float]:
    losses = []
    for step in range(STEPS):
        messages: dict[int, torch.Tensor] = {}
        for number, kind, i in _in_turn():
            stage = stages[number]
            if kind == "F":
                messages[i] = stage.forward(i, messages[i] if number else _input(step, i))
                losses += [messages[i].item()] if number else []
            else:
                messages[i] = stage.backward(i, None if number else messages[i])
        for stage in stages:
            stage.step()
    return losses


def _case(precision: str, rank: int, group: Any) -> dict[str, Any]:
    own = _Stage(rank, precision, group)
    losses = _stage_of_rank(rank, own)
    stages = [_Stage(number, precision, group) for number in range(2)]
    expected = _one_process(stages)
    model: nn.Module = stages[rank].model
    return {
        "losses": losses,
        "expected": expected if rank else [],
        "differences": differences(own.model, model),
    }


def pipeline(rank: int) -> dict[str, Any]:
    """Returns the result of each precision, by name."""
    group = alone(rank)  # each stage has one rank
    return {precision: _case(precision, rank, group) for precision in RECIPES}
