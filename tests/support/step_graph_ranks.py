"""What ranks of distributed/test_step_graphs_on_ranks run: training steps, each one CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from replica_reference import RECIPES, loss_of, make, micro_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te

BEFORE, COMPARED = 11, 4  # number of steps; before a capture, DistributedDataParallel needs 11


def _replicas(precision: str) -> nn.Module:
    return DistributedDataParallel(_layers(), gradient_as_bucket_view=True)


def _shards(precision: str) -> nn.Module:
    """Makes sharded layers with FP8 weights; in bf16 the weights stay plain."""
    recipe = RECIPES[precision]
    with te.quantized_model_init(recipe is not None, recipe, preserve_high_precision_init_val=True):
        model = _layers()
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cuda", (2,)))
    return model


def _layers() -> nn.Sequential:
    return nn.Sequential(*[make("TransformerLayer", seed) for seed in range(2)])


WAYS: dict[str, Callable[[str], nn.Module]] = {
    "DistributedDataParallel": _replicas,
    "fully_shard": _shards,
}


def _losses(way: str, precision: str, rank: int, in_graph: bool) -> list[torch.Tensor]:
    recipe, stream = RECIPES[precision], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = WAYS[way](precision)
        parameters = list(model.parameters())
        optimizer = te.optimizers.FusedAdam(
            parameters, lr=1e-2, master_weights=True, capturable=True
        )
        x = micro_batch(0, 0, rank)

        def step() -> torch.Tensor:
            with te.autocast(recipe is not None, recipe=recipe):
                loss = loss_of(model(x))
            loss.backward()
            optimizer.step(grad_factor=te.optimizers.clip_factor(parameters, 1.0)[1])
            optimizer.zero_grad()
            return loss.detach()

        for number in range(BEFORE):
            x.copy_(micro_batch(number, 0, rank))
            step()
        run: Any = step
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                loss = step()

            def run() -> torch.Tensor:
                graph.replay()
                return loss

        found = []
        for number in range(BEFORE, BEFORE + COMPARED):
            x.copy_(micro_batch(number, 0, rank))
            found.append(run().clone())
    torch.cuda.synchronize()
    return found


def step_graphs(rank: int) -> dict[tuple[str, str], list[list[float]]]:
    """Returns the losses of eager steps and of replayed graphs, for each case."""
    found = {}
    for way in WAYS:
        for precision in RECIPES:
            both = [_losses(way, precision, rank, in_graph) for in_graph in (False, True)]
            found[way, precision] = [torch.stack(losses).tolist() for losses in both]
            gc.collect()  # `destroy_process_group` waits for graphs with collectives of the group
    return found
