"""Compares Megatron-Core's schedules and distributed optimizer on two GPUs with one GPU."""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from attempts import attempt
from megatron_ranks import LAYOUTS, LENGTH, batch, gpt, groups, take_parts

import transformer_engine.pytorch as te

MICRO_BATCHES, STEPS = 4, 8
FP8 = {"bf16": None, "delayed": "delayed", "tensorwise": "tensorwise"}
# Bounds for losses, as in `megatron_ranks`; in bf16, sums over ranks are rounded once more.
BOUNDS = {"bf16": 2e-2, "delayed": 5e-2, "tensorwise": 5e-2}


def _trained(layout: dict[str, Any], recipe: str | None, whole: Any, state: Any) -> list[float]:
    """Returns this rank's losses under Megatron's optimizer; a pipeline's last rank has them."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    model = gpt(layout, recipe, dtype=torch.bfloat16, fp8_param=recipe is not None)
    take_parts(model, whole, layout)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, config, Float16Module(model.config, model))
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    model.config.finalize_model_grads_func = finalize_model_grads
    context = state.get_context_parallel_group() if "context_parallel_size" in layout else None

    def forward(words: Any, module: Any) -> Any:
        x = next(words)
        positions = torch.arange(LENGTH, device=x.device).expand(len(x), -1)
        ids, positions, labels = te.distributed.shard_sequence(
            [x[:, :-1], positions, x[:, 1:]], context, [1, 1, 1]
        )
        out = module(ids, positions, None, labels=labels)
        return out, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})

    found = []
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([batch(step + i) for i in range(MICRO_BATCHES)]),
            model=[wrapped],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        if reported:
            loss = torch.stack([one["loss"] for one in reported]).mean()
            if context is not None:
                dist.all_reduce(loss, group=context)
                loss /= 2
            found.append(loss.item())
    return found


def trained(rank: int) -> dict[str, Any]:
    """Returns losses of two ranks and of each alone, by layout and precision; or a traceback."""
    warnings.simplefilter("ignore")  # Megatron emits many
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        for precision, recipe in FP8.items():
            found[f"{name}, {precision}"] = attempt(_compared, layout, recipe)
    return found


@functools.cache
def _alone(recipe: str | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Returns the initial parameters of one rank alone, and its losses."""
    with groups({}) as state:
        model = gpt({}, recipe, dtype=torch.bfloat16)
        whole = {key: p.detach().clone() for key, p in model.named_parameters()}
        return whole, _trained({}, recipe, whole, state)


def _compared(layout: dict[str, Any], recipe: str | None) -> tuple[list[float], list[float]]:
    """Returns the losses of ranks that share a model, and of one rank alone."""
    whole, expected = _alone(recipe)
    with groups(layout) as state:
        return _trained(layout, recipe, whole, state), expected
