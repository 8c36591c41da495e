"""Compares Megatron-Core's GPT on two ranks with the same model on each rank alone.

Megatron allocates buffers on the current CUDA device. On CPUs the tests replace
`torch.cuda.current_device`. Where Megatron names "cuda" itself, CPUs cannot run it: pipeline
schedules, optimizers, rotary positions, and the stream and sequence slices of context parallelism.
`megatron_training.py` runs these on GPUs.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attempts import attempt
from rank_device import here

import transformer_engine.pytorch as te

VOCABULARY, LENGTH, BATCH, STEPS = 128, 32, 2, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 + SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "TP2 + SP, MLP of operations": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "fused_mlp": True,
    },
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}
PRECISIONS = {"fp32": None, "delayed": "delayed", "tensorwise": "tensorwise"}
# Bounds for losses. Ranks sum in another order, FP8 rounds to other codes, and errors grow with
# each step.
BOUNDS = {"fp32": 1e-5, "delayed": 5e-3, "tensorwise": 5e-3}


@contextmanager
def groups(layout: dict[str, Any]) -> Iterator[Any]:
    """Initialises Megatron's process groups and RNG tracker."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    sizes = {name: size for name, size in layout.items() if name.endswith("_size")}
    parallel_state.initialize_model_parallel(**sizes)
    random.initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    random.get_cuda_rng_tracker().add("model-parallel-rng", 1 + dist.get_rank())
    try:
        yield parallel_state
    finally:
        random.get_cuda_rng_tracker().reset()
        parallel_state.destroy_model_parallel()


def gpt(
    layout: dict[str, Any],
    recipe: str | None,
    dtype: torch.dtype = torch.float32,
    fp8_param: bool = False,
) -> Any:
    """Returns this rank's part of the model; `fp8_param` keeps weights in FP8 only."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    fp8: dict[str, Any] = (
        {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_amax_history_len": 4} if recipe else {}
    )
    fp8 |= {"fp8_param": True} if fp8_param else {}
    shared = {name: value for name, value in layout.items() if name != "fused_mlp"}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **fp8,
        **shared,
    )
    stages = layout.get("pipeline_model_parallel_size", 1)
    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=True, use_te_op_fuser="fused_mlp" in layout
        ),
        VOCABULARY,
        LENGTH,
        pre_process=stages == 1 or dist.get_rank() == 0,
        post_process=stages == 1 or dist.get_rank() == 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    ).to(here())


def take_parts(model: Any, whole: dict[str, torch.Tensor], layout: dict[str, Any]) -> None:
    """Copies this rank's part of the weights of one process into a model."""
    rank = dist.get_rank()
    later = rank if "pipeline_model_parallel_size" in layout else 0  # layers on earlier ranks
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = whole[name.replace("layers.0", f"layers.{later}")]
            if parameter.shape != value.shape:
                halves = value.chunk(2) if "linear_fc1" in name else (value,)  # gate and linear
                dim = parameter.partition_dim
                value = torch.cat([half.chunk(2, dim)[rank] for half in halves], dim)
            parameter.copy_(value)
            if hasattr(parameter, "get_high_precision_init_val"):  # master weights start from it
                parameter.get_high_precision_init_val().copy_(value)


def share_sequences(model: Any, group: Any) -> None:
    """Sets the context-parallel group, as Megatron does where there are CUDA streams."""
    for module in model.modules():
        if isinstance(module, te.DotProductAttention):
            module.set_context_parallel_group(group, dist.get_process_group_ranks(group), None)


def batch(step: int) -> torch.Tensor:
    """Returns tokens `[BATCH, LENGTH + 1]`; each row counts up in steps of its own."""
    start = torch.arange(LENGTH + 1, device=here()) + step % 2
    return torch.stack([start * (i + 1) % VOCABULARY for i in range(BATCH)])


def losses(model: Any, layout: dict[str, Any], state: Any) -> list[float]:
    """Returns the losses of all steps; in a pipeline, only the last rank has losses."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    found: list[float] = []
    context = state.get_context_parallel_group() if "context_parallel_size" in layout else None
    for step in range(STEPS):
        model.set_is_first_microbatch()
        wrapped.zero_grad_buffer()
        words = batch(step)
        positions = torch.arange(LENGTH, device=here()).expand(BATCH, -1)
        ids, positions, labels = te.distributed.shard_sequence(
            [words[:, :-1], positions, words[:, 1:]], context, [1, 1, 1]
        )
        if "pipeline_model_parallel_size" in layout:
            loss = _stage(wrapped, ids, positions, labels)
        else:
            loss = wrapped(ids, positions, None, labels=labels).float().mean()
            loss.backward()
        finalize_model_grads([wrapped])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()
        if loss is None:
            continue
        loss = loss.detach()
        if context is not None:
            dist.all_reduce(loss, group=context)
            loss /= 2
        found.append(loss.item())
    return found


def _stage(model: Any, ids: Any, positions: Any, labels: Any) -> torch.Tensor | None:
    """Runs forward and backward of this rank's half of the layers; rank 1 returns the loss."""
    shape = (LENGTH, BATCH, 64)
    if dist.get_rank() == 0:
        out = model(ids, positions, None)
        dist.send(out.detach().contiguous(), 1)
        grad = torch.empty(shape, device=here())
        dist.recv(grad, 1)
        out.backward(grad)
        return None
    x = torch.empty(shape, device=here())
    dist.recv(x, 0)
    model.module.set_input_tensor(x.requires_grad_())
    loss: torch.Tensor = model(ids, positions, None, labels=labels).float().mean()
    loss.backward()
    assert x.grad is not None
    dist.send(x.grad, 0)
    return loss


@functools.cache
def _alone(recipe: str | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Returns the initial parameters of one rank alone, and its losses."""
    with groups({}) as state:
        alone = gpt({}, recipe)
        whole = {name: p.detach().clone() for name, p in alone.named_parameters()}
        return whole, losses(alone, {}, state)


def _compared(layout: dict[str, Any], recipe: str | None) -> tuple[list[float], list[float]]:
    whole, expected = _alone(recipe)
    with groups(layout) as state:
        if "context_parallel_size" in layout and here().type == "cpu":
            model = gpt({}, recipe)  # Megatron would make a CUDA stream
            share_sequences(model, state.get_context_parallel_group())
        else:
            model = gpt(layout, recipe)
        take_parts(model, whole, layout)
        return losses(model, layout, state), expected


def compared(rank: int) -> dict[str, Any]:
    """Returns losses of two ranks and of one, by layout and precision; or a traceback."""
    warnings.simplefilter("ignore")  # Megatron emits many
    if here().type == "cpu":
        torch.cuda.current_device = here  # Megatron allocates buffers of collectives here
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        for precision, recipe in PRECISIONS.items():
            found[f"{name}, {precision}"] = attempt(_compared, layout, recipe)
    return found
