"""`parallelize`: ranks of a mesh share a model that is built already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.layers.transformer_layer import TransformerLayer
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.parallel.gradients import mark_own_tokens
from transformer_engine.pytorch.parallel.groups import TensorParallel
from transformer_engine.pytorch.parallelize import remake
from transformer_engine.pytorch.parallelize.checkpoints import share_state

_WHOLE_LAYERS = (TransformerLayer, MultiheadAttention, LayerNormMLP)
_KINDS: dict[str, tuple[type, ...]] = {
    "column": (Linear, LayerNormLinear, GroupedLinear),
    "row": (Linear, GroupedLinear),
    "heads": (DotProductAttention,),
    "layer": _WHOLE_LAYERS,
    "tokens": (nn.Module,),
    "scatter": (nn.Module,),
    "whole": (nn.Module,),
}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    *,
    sequence_parallel: bool = False,
    cp_comm_type: str = "p2p",
    cp_stream: Any = None,
) -> nn.Module:
    """Let the ranks of a mesh share a built model: its weights become this rank's parts of them.

    Call it before the model's first forward, before an optimizer is made, and before `fully_shard`
    or DistributedDataParallel, which take the other dimensions of the mesh. Ranks must have equal
    models: from one seed, or from one checkpoint.

    Args:
        model: with layers of this package; a layer is a model, too. It is changed in place.
        mesh: its dimension `tp`, where it has one, shares layers (tensor parallelism); its
            dimension `cp` shares sequences (context parallelism, see `shard_sequence`). Others are
            for checkpoints alone, which are cut along all of them.
        plan: for names of modules, or patterns such as `"blocks.*.up"`, what becomes of them:
            `"column"` (Linear, LayerNormLinear, GroupedLinear: a rank has some of the outputs),
            `"row"` (Linear, GroupedLinear: some of the inputs), `"heads"` (DotProductAttention),
            `"layer"` (TransformerLayer, MultiheadAttention and LayerNormMLP: what they become
            without a plan), `"whole"` (every rank has all of it: what others become). With
            `sequence_parallel` also `"scatter"`: a rank goes on with its part of the output along
            the first dimension (embeddings), and `"tokens"`: it runs on a rank's tokens, as norms
            between layers do. Gradients of both are summed by `all_reduce_sequence_parallel_grads`.
        sequence_parallel: between layers, ranks of `tp` have parts of the tokens, along the first
            dimension.
        cp_comm_type: `p2p`, `all_gather` or `a2a`, see `DotProductAttention`.
        cp_stream: see `DotProductAttention`.

    Returns:
        The model.

    Raises:
        ValueError: a mesh without these dimensions; a name in the plan that no module has; sizes
            that ranks cannot share; layers that have run, that `fully_shard` has cut, or that
            were made for several ranks.
        TypeError: no model or no mesh; a plan that is no mapping; a kind that a module cannot
            become; a subclass with a constructor of its own.

    Example:
        >>> import torch
        >>> import transformer_engine.pytorch as te
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> layer = te.TransformerLayer(64, 128, 4, device="cpu")
        >>> te.parallelize(layer, mesh, sequence_parallel=True)(torch.randn(8, 2, 64)).shape
        torch.Size([8, 2, 64])
        >>> dist.destroy_process_group()
    """
    if not (isinstance(model, nn.Module) and isinstance(mesh, DeviceMesh)):
        raise TypeError(
            "[parallelize] expected a model and a DeviceMesh, got"
            f" {type(model).__name__} and {type(mesh).__name__}"
        )
    if not (plan is None or isinstance(plan, Mapping)):
        raise TypeError(
            "[parallelize] expected plan to be a mapping of names of modules to what they become, "
            f"such as {{'blocks.*.up': 'column'}}, or None, got {type(plan).__name__}"
        )
    names = mesh.mesh_dim_names or ()
    if not {"tp", "cp"}.intersection(names):
        raise ValueError(
            f"[parallelize] expected a mesh with a dimension named 'tp' or 'cp', got {names}"
        )
    if "tp" in names and mesh["tp"].size() > 1:
        _share_layers(model, mesh, plan or {}, sequence_parallel)
    if "cp" in names and mesh["cp"].size() > 1:
        group = mesh["cp"].get_group()
        ranks = dist.get_process_group_ranks(group)
        for module in model.modules():
            if isinstance(module, (MultiheadAttention, DotProductAttention)):
                module.set_context_parallel_group(group, ranks, cp_stream, cp_comm_type)
    return model


def _share_layers(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], sequence_parallel: bool
) -> None:
    group = mesh["tp"].get_group()
    ranks = TensorParallel("parallelize", "", group, 1, sequence_parallel)
    shared = {"tp_group": group, "sequence_parallel": sequence_parallel}
    remade, scattered = [], []
    for name, module, kind in _kinds(model, plan):
        changes: dict[str, Any] = {
            "layer": {**shared, "set_parallel_mode": True},
            "column": {**shared, "parallel_mode": "column"},
            "row": {**shared, "parallel_mode": "row"},
            "heads": shared,
        }.get(kind, {})
        if changes:
            remade.append((module, remake.counterpart(name, module, changes)))
        elif sequence_parallel and kind in ("scatter", "tokens"):
            scattered.append((module, kind))
    for module, counterpart in remade:  # all could be made: no model is changed by half
        remake.become(module, counterpart)
        share_state(module, mesh)
    for module, kind in scattered:
        _scatter_output(module, ranks, cut=kind == "scatter")


def _kinds(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules by name, outermost first, with what they become; nothing inside of such a module."""
    names = [name for name, _ in model.named_modules()]
    unknown = sorted(one for one in plan if not any(fnmatchcase(name, one) for name in names))
    if unknown:
        raise ValueError(
            f"[parallelize] expected a plan of modules of the model, got {unknown}, which it does "
            "not have"
        )
    done: list[str] = []
    inside = set(plan)  # entries that name nothing but parts of such modules
    module: nn.Module
    for name, module in model.named_modules():
        if any(name.startswith(one) for one in done):
            continue
        matching = [one for one in plan if fnmatchcase(name, one)]
        inside.difference_update(matching)
        planned = plan[matching[0]] if matching else None
        kind = planned or ("layer" if isinstance(module, _WHOLE_LAYERS) else None)
        if kind is None:
            continue
        if kind not in _KINDS or not isinstance(module, _KINDS[kind]):
            raise TypeError(
                f"[parallelize] expected one of {[*_KINDS]} that a {type(module).__name__} can"
                f" become, got {kind!r} (module {name!r})"
            )
        done.append(f"{name}." if name else "")
        yield name, module, kind
    if inside:
        raise ValueError(
            "[parallelize] expected a plan of modules that are not parts of shared ones, got"
            f" {sorted(inside)}: a layer is shared as a whole"
        )


def _scatter_output(module: nn.Module, ranks: TensorParallel, cut: bool) -> None:
    """Note that gradients of its parameters are of a rank's tokens; `cut`: its output is, too."""
    mark_own_tokens(module, ranks)
    if cut:
        module.register_forward_hook(partial(_own_part, ranks))


def _own_part(
    ranks: TensorParallel, module: nn.Module, arguments: Any, out: torch.Tensor
) -> torch.Tensor:
    if out.shape[0] % ranks.size:
        raise ValueError(
            f"[parallelize] expected a first size that can be divided by tp_size={ranks.size}, got "
            f"{out.shape[0]}, with sequence_parallel=True"
        )
    assert ranks.rank is not None
    return out.chunk(ranks.size)[ranks.rank]
