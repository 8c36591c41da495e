"""`DotProductAttention`: turns its arguments into a `Call`, which a backend that takes it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch._torch_private import constant_in_graphs
from transformer_engine.pytorch.attention.backends import exported
from transformer_engine.pytorch.attention.cache.generation import check_params, with_cache
from transformer_engine.pytorch.attention.context.settings import SharesContext, context_group
from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.arguments import (
    LATER,
    arguments_of,
    bias_of_rank,
    check_heads,
    check_later,
    check_settings,
    checked_inputs,
    refuse_in_export,
)
from transformer_engine.pytorch.attention.core.call import (
    NO_DROPOUT,
    AttentionMask,
    Call,
    CallArguments,
    Dropout,
    call_shape,
)
from transformer_engine.pytorch.attention.core.casts import (
    GEMMS,
    Casts,
    casts_of,
    casts_of_part,
    wants_fp8,
)
from transformer_engine.pytorch.attention.core.packed_inputs import unpacked
from transformer_engine.pytorch.attention.core.sinks import HasSink
from transformer_engine.pytorch.attention.core_attention import CoreAttention
from transformer_engine.pytorch.attention.masks.masks import Window, as_window, mask_rule
from transformer_engine.pytorch.attention.max_logit import max_logit
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.chain.part import Incoming, Planned
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.fp8.process_state import Scope
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.module.arguments import tensor_parallel
from transformer_engine.pytorch.module.inputs import names_layer
from transformer_engine.pytorch.module.names import layer_name
from transformer_engine.pytorch.parallel.groups import SharedByRanks
from transformer_engine.pytorch.rng import check_tracker, tracker_from


@joins_chains
class DotProductAttention(SharesContext, HasSink, SharedByRanks, ScaledModule):
    """softmax(query key^T / sqrt(size)) value, for each head.

    Args:
        num_attention_heads: number of query heads.
        kv_channels: size of a head; a pair gives keys and values sizes of their own.
        num_gqa_groups: number of key and value heads; each of them serves `num_attention_heads /
            num_gqa_groups` query heads. None for as many as query heads.
        attention_dropout: probability of dropping an attention weight in training.
        qkv_format: `sbhd` is `[sequence, batch, heads, size]`, `bshd` is `[batch, sequence, heads,
            size]`, and `thd` is `[tokens, heads, size]`: sequences one after the other, which end
            as `cu_seqlens_q` and `cu_seqlens_kv` say.
        attn_mask_type: `no_mask`; `causal` (query i sees keys up to i) or `causal_bottom_right`
            (the last query sees the last key); `padding`, `padding_causal` or
            `padding_causal_bottom_right`, which hide what lies behind the end of a sequence;
            `arbitrary`, a mask of your own. `forward` may override it.
        window_size: `(left, right)`: query i sees keys i - left to i + right; -1 is no limit.
            `forward` may override it.
        sequence_parallel: with True, dropout does not use the tracker's RNG states.
        tp_size: number of tensor parallel ranks. The numbers of heads above are of all ranks.
        get_rng_state_tracker: returns the tracker whose `fork()` dropout runs in.
        tp_group: tensor parallel group; decides which ALiBi slopes and sinks a rank has.
        layer_number: number of the layer, from 1.
        attention_type: `self` or `cross`.
        cp_group: process group of the ranks that share sequences; for `a2a+p2p` a list of two, that
            of the exchange of heads first. See `docs/how-to/context_parallel.md`.
        cp_global_ranks: global ranks of `cp_group`, which are checked; None for no check.
        cp_stream: accepted for compatibility; parts are merged on the current stream.
        bottom_right_diagonal: align windows of non-causal mask types bottom-right; None is True.
        cp_comm_type: `p2p`, `all_gather`, `a2a` or `a2a+p2p`.
        softmax_scale: factor on the scores; None is `1 / sqrt(size of a key)`.
        softmax_type: `vanilla`; `off-by-one` adds 1 to the denominator; `learnable` adds
            exp(`softmax_offset`), a parameter `[num_attention_heads]`, initially zero.
        return_max_logit: also return the largest score of each head, which is computed separately.
        name: name of the layer.

    Raises:
        ValueError: invalid numbers of heads, formats, mask types or windows.
        TypeError: unknown arguments, or arguments of a wrong type.
        NotImplementedError: settings that are not implemented.

    Example:
        >>> attention = DotProductAttention(8, 64, attn_mask_type="causal")
        >>> q = k = v = torch.randn(16, 2, 8, 64)
        >>> attention(q, k, v).shape
        torch.Size([16, 2, 512])
    """

    former_extra_state = "fused_attention._extra_state"
    not_in_chains = frozenset({*LATER, "inference_params"})  # keywords, see `chain.flow`

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        *,
        bottom_right_diagonal: bool | None = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(GEMMS)
        self.name = layer_name(name, type(self).__name__)
        self.ranks = tensor_parallel(self, tp_group, tp_size, sequence_parallel)
        self.return_max_logit = return_max_logit
        check_tracker(type(self).__name__, get_rng_state_tracker, self.name)
        check_settings(self.name, attention_type, attention_dropout, softmax_scale)
        groups, sizes = check_heads(self.name, num_attention_heads, num_gqa_groups, kv_channels)
        window = as_window(window_size)
        mask_rule(attn_mask_type, window, bottom_right_diagonal)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        share = self.ranks.share
        self.local_heads = share("num_attention_heads", num_attention_heads)
        self.local_groups = share("num_gqa_groups", groups)
        self.key_channels, self.value_channels = sizes
        self.attention_dropout = attention_dropout
        self.qkv_format = formats.check_format(qkv_format)
        self.attn_mask_type = attn_mask_type
        self.window_size, self.bottom_right_diagonal = window, bottom_right_diagonal
        self.attention_type, self.layer_number = attention_type, layer_number
        usual = 1.0 / math.sqrt(self.key_channels)
        self.softmax_scale = usual if softmax_scale is None else softmax_scale
        self._core = CoreAttention()
        self._add_sink(softmax_type)
        self.sequence_parallel = sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks that share sequences; the arguments are those of the constructor."""
        arguments = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.context = context_group(self.name, (self.local_heads, self.local_groups), *arguments)
        self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type = arguments

    @names_layer
    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: AttentionMask | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        *,
        bottom_right_diagonal: bool | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        pad_between_seqs: bool | None = None,
        num_splits: int = 1,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        **others: Any,
    ) -> Any:
        """Compute attention.

        Args:
            query_layer: `[sequence, batch, heads, size]`, or as `qkv_format` says.
            key_layer: the same with `num_gqa_groups` heads.
            value_layer: the same with `num_gqa_groups` heads.
            attention_mask: bool, True = hidden. For padding types `[batch, 1, 1, sequence]`, or a
                pair of them for queries and keys; for `arbitrary` any shape that broadcasts to
                `[batch, heads, queries, keys]`. Other types ignore it.
            qkv_format: overrides the constructor's.
            cu_seqlens_q: int32 `[batch + 1]`, ends of the query sequences, after a 0; for `thd`,
                and for padding types with other formats instead of a mask.
            cu_seqlens_kv: the same for keys and values.
            max_seqlen_q: longest query sequence of `thd`; without it the host waits for the GPU.
            max_seqlen_kv: the same for keys and values.
            attn_mask_type: overrides the constructor's.
            window_size: overrides the constructor's.
            checkpoint_core_attention: compute attention again in the backward instead of keeping
                its weights.
            core_attention_bias_type: `no_bias`, `pre_scale_bias` (added to query key^T),
                `post_scale_bias` (added after scaling) or `alibi`.
            core_attention_bias: broadcasts to `[batch, heads, queries, keys]`.
            alibi_slopes: fp32 `[heads]` or `[batch, heads]`, without gradients; None for defaults.
            fast_zero_fill: without effect: results of padding are always zero.
            inference_params: keys and values of earlier tokens, see `InferenceParams`. Masks and
                windows are aligned bottom-right, because queries are the last tokens.
            bottom_right_diagonal: overrides the constructor's.
            cu_seqlens_q_padded: where query sequences of `thd` start, if there is padding between.
            cu_seqlens_kv_padded: the same for keys and values.
            pad_between_seqs: without effect: the two arguments above say it.
            num_splits: without effect.
            qkv_layer: queries, keys and values in one tensor, instead of the first three arguments:
                `[sequence, batch, 3, heads, size]`, or as `qkv_format` says.
            kv_layer: keys and values in one tensor, instead of the second and third argument:
                `[sequence, batch, 2, heads, size]`, or as `qkv_format` says.
            qkv_interleave_dim: the dimension of 3 or 2 of these: -3, or -2 if it is behind the
                heads.
            others: `fp8_output`, `bf16_backward`, `score_mod`, `score_mod_bprop`,
                `score_mod_tensors` and `score_mod_bprop_tensors`. Only their defaults, False and
                None, are implemented.

        Returns:
            `[sequence, batch, heads * size of a value]`, or as `qkv_format` says. With
            `return_max_logit`, also fp32 `[heads]`, -inf for a head that sees no key; with a
            `cp_group`, over the queries and keys of all ranks, and equal on all.

        Raises:
            ValueError: shapes, masks, `cu_seqlens` or biases that do not fit together; a call that
                no backend takes, with the reason of each.
            TypeError: dtypes that are not supported or differ; unknown keywords.
            NotImplementedError: another value of a keyword of `others`.
        """
        if others:
            check_later(self, others)
        inputs: tuple[Any, Any, Any] = (query_layer, key_layer, value_layer)
        if qkv_layer is not None or kv_layer is not None:
            inputs = unpacked(*inputs, qkv_layer, kv_layer, qkv_interleave_dim)
        query, key, value = checked_inputs(*inputs)
        own = arguments_of(
            self,
            attention_mask,
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            bottom_right_diagonal=bottom_right_diagonal,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        )
        if exports := exporting():
            refuse_in_export(self, own.qkv_format, inference_params)
        casts = casts_of(self, (query, key, value), checkpoint_core_attention)
        step, cache = None, ""
        if inference_params is not None:
            check_params(inference_params, self.layer_number, self)
            (query, key, value), own, step = with_cache(
                (query, key, value), own, inference_params, self.layer_number
            )
            cache = inference_params.kind if step is None else step.kind
        call = self._call((query.shape, key.shape, value.shape), query.device, own, cache, casts)
        out = (exported.attend if exports else self._core)(query, key, value, call)
        if casts is not None and casts.columns is not None:
            casts.columns.record_amaxes(out)
        out = out if step is None else step.restored(out)
        return (out, max_logit(query, key, call)) if self.return_max_logit else out

    def drop_plans(self) -> None:
        """Drop plans that point to scaling state which has moved."""
        self._core.drop_plans()

    @property
    def chain(self) -> Chain:
        """The stage of attention, see `chain.flow`."""
        return self._core.chain

    def plan_call(
        self, values: Incoming, attention_mask: AttentionMask | None = None, **arguments: Any
    ) -> Planned | None:
        """The plan and the parameters of a call as a part of a larger chain, see `chain.flow`.

        Arguments are those of `forward`. None if the call needs more than the stage `Attention`.
        """
        if self.return_max_logit:
            return None
        cast = casts_of_part(self, values.records, values.like.device)
        if cast is None:
            return None
        casts, state = cast
        own = arguments_of(self, attention_mask, **arguments)
        if torch.compiler.is_compiling() and (own.checkpoint or self._drops()):
            return None
        shapes = formats.shapes_of_heads(
            [like.shape[:-1] for like in values.likes],
            (self.local_heads, self.local_groups),
            (self.key_channels, self.value_channels),
        )
        call = self._call(shapes, values.like.device, own, casts=casts)
        if torch.compiler.is_compiling():
            fixed = call._replace(scale=self._constant_scale())
            if call.scale != fixed.scale:
                return None
            call = fixed
        plan, parameters = self._core.plan_call(values, call)
        if state:
            plan.state = state
        return plan, parameters

    @constant_in_graphs
    def _constant_scale(self) -> float:
        """`softmax_scale` as a constant, because Dynamo may have made the attribute a symbol."""
        return self.softmax_scale

    def _call(
        self,
        shapes: formats.Shapes,
        device: torch.device,
        own: CallArguments,
        cache: str = "",
        casts: Casts | None = None,
    ) -> Call:
        shape = call_shape(
            own.qkv_format,
            (self.local_heads, self.local_groups),
            (self.key_channels, self.value_channels),
            shapes,
            own.mask_type,
            own.window,
            own.bottom_right,
        )
        return Call(
            shape,
            own.attention_mask,
            own.query_sequences,
            own.key_sequences,
            bias_of_rank(own.bias, self.num_attention_heads, self.ranks, device),
            self.softmax_scale,
            self._dropout(),
            own.checkpoint,
            self._sink(device),
            cache,
            self.training,
            casts,
            self.context,
            max_logit=self.return_max_logit,
        )

    def _drops(self) -> bool:
        return self.training and self.attention_dropout > 0.0

    def _dropout(self) -> Dropout:
        return Dropout(self.attention_dropout, self._tracker()) if self._drops() else NO_DROPOUT

    def _tracker(self) -> Any:
        """The tracker that dropout draws from; None for torch's generator."""
        if self.sequence_parallel:
            return None
        return tracker_from("attention", self.get_rng_state_tracker, "fork", layer=self.name)

    def updates(self, scope: Scope) -> bool:
        """Whether a step of this module in this scope ends with an update of scales."""
        return super().updates(scope) and wants_fp8(scope.recipe)

    def extra_repr(self) -> str:
        """Heads, sizes and mask."""
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups},"
            f" channels=({self.key_channels}, {self.value_channels}),"
            f" mask={self.attn_mask_type!r}, format={self.qkv_format!r}"
        )
