"""Decides whether a layer runs as one node of autograd's graph, or as one node for each part.

If nobody observes a part, and the host rather than the GPU determines the time of the call, the
stages of all parts are one chain that runs as one node (`fused_layer.py`). A layer runs part by
part if one of these conditions holds:

    functorch transforms the call, or it is exported for inference;
    the first input is too large for `is_host_bound`: parts free memory earlier;
    somebody observes a part: a hook on it or on all modules, a subclass, a `forward` that was
        replaced on the object or its class, a compiled module, parametrisation, another class;
    a parameter has a hook, so that somebody waits for its gradient;
    saved tensors pass through hooks (offloading), or the call is in a checkpoint in FP8;
    torch.autocast is on;
    a part has no chain for its arguments: a cache of keys and values, recomputation, a bias that
        is returned, in compiled code calibration of FP8 attention.

Compiled code has one operator for such a layer (`compiled_layer.py`). With a large input, it traces
the operator stage by stage. Both ways give the same results, bit for bit, except that a module
which somebody observes rounds its result before a residual is added (`module/residual.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch import _torch_private
from transformer_engine.pytorch.capture import is_host_bound
from transformer_engine.pytorch.chain.compiled_layer import call_operator
from transformer_engine.pytorch.chain.flow import EAGER, FlowModule
from transformer_engine.pytorch.chain.fused_layer import FusedLayer, Outdated
from transformer_engine.pytorch.dtypes import autocast_dtype
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.fp8.recompute_regions import may_recompute


def _may_fuse(x: torch.Tensor) -> bool:
    """Whether a layer with this first input may run as one node."""
    return not (
        not is_host_bound(x)
        or not x.numel()
        or x.is_meta
        or _torch_private.transforms_active()
        or _torch_private.has_global_module_hooks()
        or may_recompute(autocast_stack())
        or autocast_dtype(x) is not None
        or exporting()
    )


_MOST_FUSED = 16
# Names of the values that come into a layer, in order; a layer may get the first alone.
_VALUES = ("hidden_states", "encoder_output")


def run_layer(layer: FlowModule, values: Sequence[torch.Tensor], *groups: dict[str, Any]) -> Any:
    """Run a layer's `data_flow`, as one node of autograd's graph or part by part.

    `values` are the hidden states, then encoder output if the layer gets it; `groups` are further
    arguments by name, those that differ from their defaults.
    """
    if torch.compiler.is_compiling():
        result = call_operator(layer, values, groups)
        return layer.data_flow(EAGER, values, *groups) if result is NotImplemented else result
    try:
        result = run_as_one(layer, _VALUES[: len(values)], values, values[0], groups)
        return layer.data_flow(EAGER, values, *groups) if result is NotImplemented else result
    except (TypeError, ValueError):
        _check_values(layer, values)
        raise


def run_as_one(
    layer: Any,
    names: Sequence[str],
    values: Sequence[torch.Tensor],
    largest: torch.Tensor,
    groups: Sequence[dict[str, Any]],
) -> Any:
    """Run a `data_flow` as one node; `NotImplemented` where it must run part by part.

    `names` are those of `values`, of which `largest` is one; `groups` as in `run_layer`.
    """
    # Replicas of DataParallel have `_fused` of their original, with its parameters.
    if "_is_replica" in layer.__dict__ or not _may_fuse(largest):
        return NotImplemented
    key = (len(values), layer.flow_key(), *[tuple(group) for group in groups])
    fused = layer._fused.get(key)
    if fused is None or not fused.is_current():
        if len(layer._fused) >= _MOST_FUSED:  # a schedule of dropout adds one in each step
            layer._fused.clear()
        fused = layer._fused[key] = FusedLayer(layer, names, groups)
    try:
        return fused(values, groups)
    except Outdated:
        layer._fused.pop(key, None)  # another thread may have done so
        return run_as_one(layer, names, values, largest, groups)


def _check_values(layer: FlowModule, values: Sequence[torch.Tensor]) -> None:
    """Raise if device or dtype of a value differ from those of the layer's parameters.

    Called after a part has failed: its error names an argument of the part, not of the layer.
    """
    kind, like = type(layer).__name__, next(layer.parameters(), None)
    if like is None:  # plain tensors of the parts, in a flat parameter of FSDP
        return
    for name, x in zip(_VALUES, values, strict=False):
        if x.device != like.device:
            raise ValueError(
                f"[{kind}] expected {name} on {like.device}, where the parameters are, got"
                f" {x.device}"
            ) from None
        if x.dtype != like.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"[{kind}] Data types for parameters must match when outside of torch.autocast:"
                f" expected {name} of {like.dtype}, the parameters' dtype, got {x.dtype}"
            ) from None
