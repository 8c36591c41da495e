"""What each rank of distributed/test_replicas runs: layers under DistributedDataParallel."""

from typing import Any

import torch
import torch.distributed as dist
from rank_device import here
from replica_reference import (
    PAIRS,
    RECIPES,
    alone,
    differences,
    loss_of,
    make,
    mean_of_ranks,
    micro_batch,
    one_process,
    one_rank,
)
from sizes import as_large_inputs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te

RATE = 0.1
OPTIONS: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "views of buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1},
}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def _case(layer: str, precision: str, rank: int, group: Any, **options: Any) -> dict[str, Any]:
    recipe = RECIPES[precision]
    model, reference = make(layer), make(layer)
    if options.get("find_unused_parameters"):
        for one in (model, reference):
            one.unused = nn.Parameter(torch.zeros(2, device=here()))
    wrapped = DistributedDataParallel(model, **options)
    losses = one_rank(wrapped, recipe, rank, _sgd(model))
    expected = one_process(reference, recipe, group, _sgd(reference))
    return {"losses": losses, "expected": expected, "differences": differences(model, reference)}


def _accumulated(precision: str, rank: int, group: Any) -> dict[str, Any]:
    """Trains with two micro-batches per step.

    The first micro-batch does not reduce gradients. The second uses the FP8 weights that the first
    has cached.
    """
    recipe, losses = RECIPES[precision], []
    model, reference = make("TransformerLayer"), make("TransformerLayer")
    wrapped, optimizer = DistributedDataParallel(model), _sgd(model)
    for step in range(2):
        for number in range(2):
            wrapped.require_backward_grad_sync = number == 1  # as `no_sync` does
            with te.autocast(recipe is not None, recipe=recipe):
                y = wrapped(micro_batch(step, number, rank, 2), is_first_microbatch=number == 0)
                loss = loss_of(y)
            loss.backward()
            losses.append(mean_of_ranks(loss))
        optimizer.step()
        optimizer.zero_grad()
    expected = one_process(reference, recipe, group, _sgd(reference), range(2), micro_batches=2)
    return {"losses": losses, "expected": expected, "differences": differences(model, reference)}


def _whole_batch(precision: str, rank: int, group: Any) -> float:
    """Returns how far losses are from those of one process that runs the whole batch at once."""
    recipe, model, whole = RECIPES[precision], make("TransformerLayer"), make("TransformerLayer")
    losses = one_rank(DistributedDataParallel(model), recipe, rank, _sgd(model))
    optimizer, worst = _sgd(whole), 0.0
    for step, found in enumerate(losses):
        with te.autocast(recipe is not None, recipe=recipe, amax_reduction_group=group):
            loss = loss_of(whole(torch.cat([micro_batch(step, 0, one) for one in range(2)], 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, abs(found / loss.item() - 1.0))
    return worst


def _gemms_before_buckets(rank: int, large: bool) -> list[int]:
    """Counts the GEMMs of a backward that ran before each bucket was reduced, and all of them.

    Args:
        rank: number of this rank.
        large: run the code path of large inputs.
    """
    model, seen = make("TransformerLayer"), []
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(_gemms())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, hook)
    for step in range(2):  # DistributedDataParallel rebuilds its buckets after the first step
        seen.clear()
        te.gemm_report(reset=True)
        with as_large_inputs(large):
            loss = loss_of(wrapped(micro_batch(step, 0, rank)))
            forward = _gemms()
            loss.backward()
    return [count - forward for count in (*seen, _gemms())]


def _gemms() -> int:
    report = te.gemm_report()
    return sum(report.total(kind) for kind in ("fp8", "bf16", "fp32"))


def replicas(rank: int) -> dict[str, Any]:
    """Returns the result of every case, by name."""
    group = alone(rank)
    found: dict[str, Any] = {
        f"{layer} {precision}": _case(layer, precision, rank, group) for layer, precision in PAIRS
    }
    for name, options in OPTIONS.items():
        found[name] = _case("TransformerLayer", "delayed", rank, group, **options)
    for precision in RECIPES:
        found[f"accumulated {precision}"] = _accumulated(precision, rank, group)
        found[f"whole {precision}"] = _whole_batch(precision, rank, group)
    found["large buckets"] = _gemms_before_buckets(rank, True)
    found["small buckets"] = _gemms_before_buckets(rank, False)
    return found
