"""`parallelize`: lets the ranks of a mesh share a model that is built already.

Each layer is constructed again on the meta device, with a tensor parallel group. The original layer
takes over the attributes of the new one, and keeps its rank's part of the parameters (`remake`).
"""

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
    """Let the ranks of a mesh share a built model: each rank keeps its part of the weights.

    Call it before the model's first forward, before an optimizer is made, and before `fully_shard`
    or DistributedDataParallel, which take the other dimensions of the mesh. The model must be equal
    on all ranks, for example from one seed or one checkpoint.

    Args:
        model: a model with layers of this package, or one layer. It is changed in place.
        mesh: its dimension `tp`, if any, shares layers (tensor parallelism); its dimension `cp`, if
            any, shares sequences (context parallelism, see `shard_sequence`). Other dimensions
            matter for checkpoints only, which are divided along all dimensions.
        plan: maps names of modules, or patterns such as `"blocks.*.up"`, to what they become:
            `"column"` (Linear, LayerNormLinear, GroupedLinear: a rank has some of the outputs),
            `"row"` (Linear, GroupedLinear: some of the inputs), `"heads"` (DotProductAttention),
            `"layer"` (the default of TransformerLayer, MultiheadAttention and LayerNormMLP),
            `"whole"` (every rank has the whole module: the default of all others). With
            `sequence_parallel` also `"scatter"`: the module's output is cut, and each rank goes on
            with its part along the first dimension (embeddings); and `"tokens"`: the module runs on
            a rank's own tokens, like norms between layers. The gradients of modules of these two
            kinds must be summed by `all_reduce_sequence_parallel_grads`.
        sequence_parallel: between layers, ranks of `tp` have parts of the tokens, along the first
            dimension.
        cp_comm_type: `p2p`, `all_gather` or `a2a`, see `DotProductAttention`.
        cp_stream: see `DotProductAttention`.

    Returns:
        The model.

    Raises:
        ValueError: a mesh without these dimensions; a name in the plan that no module has; sizes
            that ranks cannot share; layers that have run, that `fully_shard` has cut, or that
            were made for several ranks; layers whose parameters are tied to those of others.
        TypeError: not a model or not a mesh; a plan that is not a mapping; a kind that a module
            cannot become; a subclass with its own constructor.

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
    _refuse_tied(model, [module for module, _ in remade])
    for module, counterpart in remade:  # after all were made: an error leaves the model unchanged
        remake.become(module, counterpart)
        share_state(module, mesh)
    for module, kind in scattered:
        _scatter_output(module, ranks, cut=kind == "scatter")


def _refuse_tied(model: nn.Module, layers: list[nn.Module]) -> None:
    """Refuse parameters of shared layers that other modules have, too: their parts are new."""
    layer_of = {part: layer for layer in layers for part in layer.modules()}
    holders: dict[nn.Parameter, dict[nn.Module | None, str]] = {}
    for path, part in model.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            layer = layer_of.get(part)
            holders.setdefault(parameter, {}).setdefault(layer, f"{path}.{name}")
    for names in holders.values():
        if len(names) > 1:
            raise ValueError(
                "[parallelize] expected layers to share whose parameters no other module has, got"
                f" tied ones: {' and '.join(names.values())}, whose parts would not be tied"
            )


def _kinds(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields name, module and kind, outermost first; modules inside a yielded one are skipped."""
    names = [name for name, _ in model.named_modules()]
    unknown = sorted(one for one in plan if not any(fnmatchcase(name, one) for name in names))
    if unknown:
        raise ValueError(
            f"[parallelize] expected a plan of modules of the model, got {unknown}, which it does "
            "not have"
        )
    done: list[str] = []
    inside = set(plan)  # entries that match only modules inside of those that are yielded
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
    """Mark that a module's gradients come from a rank's own tokens; with `cut`, cut its output."""
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
