"""State dicts of shared models and of their optimizers, for `torch.distributed.checkpoint`.

A state dict uses the names that tensors have in one process, and holds each tensor as a DTensor of
the whole. So a checkpoint that is saved with one layout of ranks can be loaded with another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from transformer_engine.pytorch.fp8.weights import PART_OF_STATE
from transformer_engine.pytorch.parallel.dtensors import dtensor_states, dtensors, is_dtensor
from transformer_engine.pytorch.parallel.shards import Shard
from transformer_engine.pytorch.parallelize.parameters import (
    cut_evenly,
    gather_whole,
    held,
    part_like,
)
from transformer_engine.pytorch.tensor.shards import piece_of

_MESH = "_te_mesh"
# How torch.compile, checkpoint_wrapper and FullyShardedDataParallel name the module inside.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def share_state(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make state dicts of a layer hold whole tensors, as DTensors, and load such tensors.

    Submodules are included. The mesh has a dimension `tp`.
    """
    for part in module.modules():
        shards = {one.name: one.shard for one in held(part) if one.shard and "." not in one.name}
        if shards:
            setattr(part, _MESH, mesh)
            setattr(part, PART_OF_STATE, partial(_part_of_state, shards))
            part.register_state_dict_post_hook(partial(_share, shards))
            part.register_load_state_dict_pre_hook(partial(_take_parts, shards))


def get_state_dict(
    model: nn.Module, optimizers: Any, *, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Like `torch.distributed.checkpoint.state_dict.get_state_dict`, also for shared models.

    Parameters that ranks share, and an optimizer's states of them, become DTensors of the whole.
    All ranks must call this.

    Args:
        model: the model, also after `parallelize`, `fully_shard` or DistributedDataParallel.
        optimizers: one optimizer, or several.
        options: see torch's function.

    Returns:
        The states of the model and of the optimizers.

    Raises:
        NotImplementedError: options that flatten or gather the optimizer's states of parameters
            that ranks share.

    >>> model = nn.Linear(4, 2)
    >>> sorted(get_state_dict(model, torch.optim.Adam(model.parameters()))[0])
    ['bias', 'weight']
    """
    shared = _shared(model)
    if shared:
        _refuse("get_state_dict", options, "flatten_optimizer_state_dict")
        _refuse("get_state_dict", options, "full_state_dict")
    states: Any = dtensor_states().get_state_dict(model, optimizers, options=options)
    model_state, optimizer_state = states
    every = optimizer_state.get("state", {})
    for name, shard, _, mesh in shared:
        if name in every:
            every[name] = saved = dict(every[name])  # the optimizer itself has the other dict
            for key, x in saved.items():
                if isinstance(x, torch.Tensor) and x.dim():
                    saved[key] = _distributed(x, shard, mesh)
    return model_state, optimizer_state


def set_state_dict(
    model: nn.Module,
    optimizers: Any,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: Any = None,
) -> Any:
    """Like `torch.distributed.checkpoint.state_dict.set_state_dict`, also for shared models.

    Args:
        model: see `get_state_dict`.
        optimizers: see `get_state_dict`.
        model_state_dict: the model's state from `get_state_dict`, after loading.
        optim_state_dict: the optimizers' states from `get_state_dict`, after loading.
        options: see torch's function.

    Returns:
        What torch's function returns.

    Raises:
        NotImplementedError: options that flatten or broadcast the optimizer's states of parameters
            that ranks share.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> states = get_state_dict(model, optimizer)
    >>> _ = set_state_dict(
    ...     model, optimizer, model_state_dict=states[0], optim_state_dict=states[1]
    ... )
    """
    shared = _shared(model)
    if shared:
        _refuse("set_state_dict", options, "flatten_optimizer_state_dict")
        _refuse("set_state_dict", options, "broadcast_from_rank0")
    state = {name: dict(saved) for name, saved in optim_state_dict.get("state", {}).items()}
    for name, shard, like, _ in shared:
        for key, x in state.get(name, {}).items():
            if isinstance(x, torch.Tensor) and x.dim():
                state[name][key] = part_like(gather_whole(x, None), shard, like)
    optimizer_state: Any = {**optim_state_dict, "state": state}
    return dtensor_states().set_state_dict(
        model,
        optimizers,
        model_state_dict=model_state_dict,
        optim_state_dict=optimizer_state,
        options=options,
    )


def _refuse(op: str, options: Any, name: str) -> None:
    """Refuse an option in which torch takes parts of an optimizer's states for whole tensors."""
    if getattr(options, name, False):
        raise NotImplementedError(
            f"[{op}] expected {name}=False for a model that ranks share, got True; use "
            "the DTensors of the default options, or whole tensors from gather_parameter"
        )


def _shared(model: nn.Module) -> list[tuple[str, Shard, nn.Parameter, DeviceMesh]]:
    """Name in state dicts, shard, parameter and mesh of each parameter that ranks share."""
    found = []
    for path, module in model.named_modules():
        mesh: Any = getattr(module, _MESH, None)
        for one in held(module) if mesh is not None else ():
            if one.shard is not None and "." not in one.name:
                name = f"{path}.{one.name}" if path else one.name
                found.append((_without_wrappers(model, name), one.shard, one.parameter, mesh))
    return found


def _without_wrappers(model: nn.Module, name: str) -> str:
    """The name of a parameter in the state dicts that torch's functions make."""
    part: Any = model
    names = []
    for one in name.split("."):
        of_ddp = one == "module" and isinstance(part, nn.parallel.DistributedDataParallel)
        if not of_ddp and one not in _WRAPPED:
            names.append(one)
        part = getattr(part, one)
    return ".".join(names)


def _distributed(x: torch.Tensor, shard: Shard, mesh: DeviceMesh) -> torch.Tensor:
    """A DTensor of the whole tensor, made of the part that this rank has."""
    if is_dtensor(x) or shard.sections:  # no placement describes shards of several sections
        return cut_evenly(gather_whole(x, shard), mesh)
    return dtensors().DTensor.from_local(
        x, mesh["tp"], [dtensors().Shard(shard.dim)], run_check=False
    )


def _share(shards: dict[str, Shard], module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    mesh = getattr(module, _MESH)
    for name, shard in shards.items():
        x = state.get(prefix + name)
        if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter):
            state[prefix + name] = _distributed(x, shard, mesh)


def _take_parts(
    shards: dict[str, Shard], module: nn.Module, state: Any, prefix: str, *_: Any
) -> None:
    for name in shards:
        x = state.get(prefix + name)
        if isinstance(x, torch.Tensor) and piece_of(x) is None:  # `weights.quantized` cut those
            state[prefix + name] = _part_of_state(shards, module, name, x)


def _part_of_state(
    shards: dict[str, Shard], module: nn.Module, name: str, x: torch.Tensor
) -> torch.Tensor:
    """This rank's part of a tensor in a state dict, which may be whole, a DTensor, or the part."""
    shard, like = shards.get(name), getattr(module, name)
    if shard is not None and (is_dtensor(x) or x.shape == shard.whole_shape(like.shape)):
        return part_like(gather_whole(x, None), shard, like)
    return x
