"""A transformer layer as one autograd function: the same kernels, and a third of the host's work.

Between the parts of an ordinary layer (norm and projection, attention, projection, residual, MLP,
residual) nobody needs to look. Then their chains run one after the other without modules, and
autograd records one function instead of seven. Results and gradients are the same, bit for bit.

Whatever might look runs part by part: hooks on a part, parts of other classes, activation
checkpointing and offloading, masks of tensors, biases, a cache, FP8 attention. So does input so
large that the GPU takes longer than the host: there parts give memory back earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import bare_apply, transforms_active
from transformer_engine.pytorch.attention.core.call import AttentionMask
from transformer_engine.pytorch.attention.core.casts import asks
from transformer_engine.pytorch.attention.core.plain import (
    PlainAttention,
    Rotation,
    plain_attention,
)
from transformer_engine.pytorch.attention.core.query_key import RotaryAngles, pair_of
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.chain.chain import run_backward, run_forward
from transformer_engine.pytorch.chain.stages.base import Run, needs_of
from transformer_engine.pytorch.export.onnx import exporting
from transformer_engine.pytorch.fp8.autocast import autocast_stack
from transformer_engine.pytorch.kernels.dropout_add import dropout_add_backward
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    may_repeat,
)
from transformer_engine.pytorch.module.dropout_add import drawn_and_added
from transformer_engine.pytorch.module.inputs import autocast_dtype
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.recompute.regions import top_hooks

if TYPE_CHECKING:
    from transformer_engine.pytorch.module.transformer_layer import TransformerLayer

_KNOWN = {"is_first_microbatch", "rotary_pos_emb"}
_MOST_BYTES = 32 * 1024 * 1024  # of the input
_STACK = autocast_stack()

# Found once: this is on the hot path.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_has_global_hooks = torch.nn.modules.module._has_any_global_hook

_Chains = tuple[
    TransformerEngineBaseModule, TransformerEngineBaseModule, TransformerEngineBaseModule
]


class _Parts(NamedTuple):
    """What a layer is made of, where all of it is as this project made it."""

    attention: MultiheadAttention
    core: DotProductAttention
    chains: _Chains  # norm and projection, projection, MLP


class _Plan(NamedTuple):
    """What one call does.

    Attributes:
        runs: of the three chains.
        ends: how many parameters belong to the first, and to the first two.
        attention: between the first two chains.
        rotation: in front of it.
        dropout: at the end of each block.
    """

    runs: Sequence[Run]
    ends: tuple[int, int]
    attention: PlainAttention
    rotation: Rotation | None
    dropout: float


def whole_layer(
    layer: TransformerLayer,
    x: torch.Tensor,
    attention_mask: AttentionMask | None,
    given: dict[str, Any],
) -> torch.Tensor | None:
    """The result of a layer; None where it must run part by part.

    Args:
        layer: any.
        x: its input, checked and contiguous.
        attention_mask: what the caller gave.
        given: what else the caller gave that attention has to know.
    """
    if _is_compiling() or attention_mask is not None or given.keys() - _KNOWN:
        return None
    parts = _parts(layer)
    if parts is None or not _is_quiet(x, parts.core.name):
        return None
    recording = _is_grad_enabled()
    attention = plain_attention(parts.core, parts.attention.layout, x, recording)
    if attention is None:
        return None
    first, second, third = [module.chain_parameters()[0] for module in parts.chains]
    needs: tuple[tuple[bool, ...], ...] = ((), (), ())
    if recording:
        needs = (needs_of(x.requires_grad, first), needs_of(True, second), needs_of(True, third))
        if True not in needs[0]:
            return None
    microbatch = given.get("is_first_microbatch")
    runs = [
        module.run_outside(x, own, wanted, microbatch)
        for module, own, wanted in zip(parts.chains, (first, second, third), needs, strict=True)
    ]
    ends = (len(first), len(first) + len(second))
    dropout = layer.hidden_dropout if layer.training else 0.0
    plan = _Plan(runs, ends, attention, _rotation(parts.attention, given), dropout)
    if recording:
        result: torch.Tensor = _apply(plan, x, *first, *second, *third)
        return result
    return _forward(plan, x, (*first, *second, *third), None)


def _rotation(attention: MultiheadAttention, given: dict[str, Any]) -> Rotation | None:
    angles: RotaryAngles | None = given.get("rotary_pos_emb")
    if angles is None:
        return None
    of_query, of_key = pair_of(angles)
    return Rotation(of_query, of_key, attention.rotary_pos_interleaved)


def _parts(layer: TransformerLayer) -> _Parts | None:
    if layer.training and layer.drop_path_rate:
        return None
    if layer.layer_type != "encoder" or layer.parallel_attention_mlp or layer.output_layernorm:
        return None
    modules: dict[str, Any] = layer._modules
    attention, mlp = modules["self_attention"], modules["layernorm_mlp"]
    if type(attention) is not MultiheadAttention or type(mlp) is not LayerNormMLP:
        return None
    own: dict[str, Any] = attention._modules
    qkv: Any = own.get("layernorm_qkv")
    core, proj = own["core_attention"], own["proj"]
    kinds = (type(qkv), type(core), type(proj))
    if kinds != (LayerNormLinear, DotProductAttention, Linear) or own.get("q_norm") is not None:
        return None
    for module in (attention, qkv, core, proj, mlp):
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
        ):
            return None
    if mlp.checkpoint or mlp.return_bias or proj.return_bias:
        return None
    return _Parts(attention, core, (qkv, proj, mlp))


def _is_quiet(x: torch.Tensor, attention: str) -> bool:
    """Whether nothing around the call might look into it; `attention` is a name for an error."""
    return not (
        x.nbytes > _MOST_BYTES
        or not x.numel()
        or transforms_active()
        or may_repeat()
        or top_hooks(True) is not None
        or _has_global_hooks()
        or asks(_STACK.scope, attention)
        or autocast_dtype(x) is not None
        or exporting()
    )


def _forward(plan: _Plan, x: torch.Tensor, parameters: tuple[Any, ...], ctx: Any) -> torch.Tensor:
    """The layer; `ctx` keeps what its backward needs, None where there will be none."""
    runs, (one, two), attention, rotation, dropout = plan
    kept: list[Any] = []
    replays: list[Any] = []

    def chain(i: int, value: torch.Tensor, own: tuple[Any, ...]) -> Any:
        if ctx is None:
            return runs[i].chain(value, own, runs[i])
        result, tensors, replay, facts = run_forward(runs[i], (value, *own))
        replays.append((replay, facts, len(tensors)))
        kept.extend(tensors)
        return result

    projection, residual = chain(0, x, parameters[:one])
    context, attended = attention.forward(projection, rotation, ctx is not None)
    out = chain(1, context, parameters[one:two])
    x, seed = drawn_and_added(out, None, residual, dropout)
    out, residual = chain(2, x, parameters[two:])
    out, last_seed = drawn_and_added(out, None, residual, dropout)
    if ctx is not None:
        ctx.plan, ctx.replays = plan, replays
        angles = (None, None) if rotation is None else rotation[:2]  # nobody may change them
        ctx.save_for_backward(context, *attended, seed, last_seed, *angles, *kept)
    return out


def _of_branch(grad: torch.Tensor, seed: torch.Tensor | None, dropout: float) -> Any:
    """The gradient of what was dropped and added; that of the residual is `grad`."""
    return grad if seed is None else dropout_add_backward(grad, seed, dropout, grad.dtype, None)[0]


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: torch.Tensor, *parameters: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return _forward(plan, x, parameters, ctx)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        runs, _, attention, rotation, dropout = ctx.plan
        context, *kept = ctx.saved_tensors
        attended, (seed, last_seed), kept = kept[:5], kept[5:7], kept[9:]
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        if not grad.is_contiguous():
            grad = grad.contiguous()

        def chain(i: int, grad: torch.Tensor, residual: torch.Tensor | None) -> Any:
            replay, facts, count = ctx.replays[i]
            tensors = kept[len(kept) - count :]
            del kept[len(kept) - count :]
            return run_backward(runs[i], replay, facts, tensors, grad, residual)

        of_middle, *of_mlp = chain(2, _of_branch(grad, last_seed, dropout), grad)
        of_context, *of_second = chain(1, _of_branch(of_middle, seed, dropout), None)
        of_projection = attention.backward(of_context, context, attended, rotation)
        of_input, *of_first = chain(0, of_projection, of_middle)
        if runs[0].ends_backward:
            _STACK.end_backward()
        return (None, of_input, *of_first, *of_second, *of_mlp)


_apply = bare_apply(_LayerFunction)
