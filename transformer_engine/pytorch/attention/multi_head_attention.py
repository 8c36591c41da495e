"""`MultiheadAttention`: projections to queries, keys and values, attention, output projection."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.attention.cache.generation import check_cross
from transformer_engine.pytorch.attention.core.call import AttentionMask
from transformer_engine.pytorch.attention.core.projections import HeadLayout, Heads, layout_of_heads
from transformer_engine.pytorch.attention.core.query_key import (
    RotaryAngles,
    Rotation,
    head_norms,
    normalized_heads,
)
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.masks.masks import Window
from transformer_engine.pytorch.attention.stage import is_recorded_on
from transformer_engine.pytorch.chain.flow import Flow, FlowModule, joins_chains
from transformer_engine.pytorch.chain.run_layer import run_layer
from transformer_engine.pytorch.module.arguments import check_keywords, tensor_parallel
from transformer_engine.pytorch.module.inputs import check_hidden, explicit_arguments, names_layer
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.names import layer_name
from transformer_engine.pytorch.module.overlap_arguments import overlap_arguments
from transformer_engine.pytorch.module.parameters import InitMethod, default_device
from transformer_engine.pytorch.module.residual import call_adding

_CORE = (  # keywords that `forward` passes on to `DotProductAttention`
    *("max_seqlen_q", "max_seqlen_kv", "bottom_right_diagonal"),
    *("pad_between_seqs", "num_splits", "fp8_output", "adds"),
)


@joins_chains
class MultiheadAttention(FlowModule):
    """Multi-head attention with its projections, and optionally a norm before them.

    Args:
        hidden_size: size of each input and output sample.
        num_attention_heads: number of query heads.
        kv_channels: size of a head; None is `hidden_size / num_attention_heads`.
        attention_dropout: probability of dropping an attention weight in training.
        layernorm_epsilon: added to the variance.
        init_method: initialises query, key and value weights; None: normal with deviation 0.023.
        output_layer_init_method: initialises the output projection's weight; None: likewise.
        layer_number: number of the layer, from 1.
        attn_mask_type: see `DotProductAttention`.
        window_size: see `DotProductAttention`.
        tp_group: tensor parallel group; None if `set_tensor_parallel_group` will give it before the
            first forward.
        tp_size: number of ranks in `tp_group`.
        num_gqa_groups: number of key and value heads; None for as many as query heads.
        fuse_wgrad_accumulation: add weight gradients to `weight.main_grad`; needs
            `fuse_qkv_params`.
        get_rng_state_tracker: returns the tracker of initialisation and dropout.
        sequence_parallel: input and output are this rank's part of the tokens, see `Linear`.
        params_dtype: dtype of the parameters; None is torch's default dtype.
        return_bias: return the output projection's bias instead of adding it.
        return_layernorm_output: also return the output of the norm.
        input_layernorm: normalise the input.
        attention_type: `self`, or `cross` for keys and values of `encoder_output`.
        set_parallel_mode: divide heads and projections among the ranks of `tp_group`; if False,
            every rank has all of them.
        fuse_qkv_params: one parameter for queries, keys and values instead of three.
        zero_centered_gamma: start gamma at 0 and multiply by `1 + gamma`.
        qkv_weight_interleaved: rows of the weight are ordered by group (the rows of a group's
            queries, key and value); if False, rows of all queries, then all keys, then all values.
            Ignored without `fuse_qkv_params`.
        bias: learn additive biases.
        normalization: `LayerNorm` or `RMSNorm`.
        device: device of the parameters; None is cuda if there is a GPU, else cpu.
        qkv_format: `sbhd`, `bshd` or `thd`, that is `[sequence, batch, hidden_size]`,
            `[batch, sequence, hidden_size]` or `[tokens, hidden_size]`.
        bottom_right_diagonal: see `DotProductAttention`.
        rotary_pos_interleaved: rotate the pairs (0, 1), (2, 3), ... instead of (0, size / 2),
            (1, size / 2 + 1), ...
        qk_norm_type: normalise the heads of queries and keys: `RMSNorm`, `LayerNorm` or
            `L2Normalization` (to length 1, without parameters); None for no norm.
        qk_norm_eps: added to the mean square, variance or sum of squares of a head.
        qk_norm_before_rope: normalise before the rotation instead of after it.
        softmax_type: see `DotProductAttention`.
        seq_length: without effect.
        micro_batch_size: without effect.
        return_input: also return the input, see `LayerNormLinear`; needs `input_layernorm`.
        name: name of the layer; its children are `<name>.layernorm_qkv`, `<name>.proj`, ...
        others: arguments that tune overlap of communication; no effect on one rank.

    Raises:
        ValueError: invalid sizes, heads or mask types, or heads that ranks cannot share equally.
        TypeError: unknown arguments.

    Example:
        >>> MultiheadAttention(64, 4, device="cpu")(torch.randn(8, 2, 64)).shape
        torch.Size([8, 2, 64])
    """

    layernorm_qkv: LayerNormLinear
    qkv: Linear
    layernorm_query: LayerNormLinear
    query_layer: Linear
    key_value: Linear

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = 1,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        bottom_right_diagonal: bool | None = None,
        rotary_pos_interleaved: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        name: str | None = None,
        return_input: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        asked = overlap_arguments(MultiheadAttention, others)
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "[MultiheadAttention] expected fuse_qkv_params=True with"
                " fuse_wgrad_accumulation=True, got False"
            )
        self.name = layer_name(name)
        self.hidden_size = hidden_size
        self.layer_number = 1 if layer_number is None else layer_number
        self.attention_type = attention_type
        self.qkv_format = qkv_format
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        ranks = tensor_parallel(self, tp_group, tp_size, sequence_parallel, set_parallel_mode)
        interleaved = qkv_weight_interleaved and fuse_qkv_params
        whole = layout_of_heads(self, num_attention_heads, num_gqa_groups, kv_channels, interleaved)
        self.layout = whole.shared(ranks)
        linear: dict[str, Any] = {
            "bias": bias,
            "get_rng_state_tracker": get_rng_state_tracker,
            "device": device,
            "sequence_parallel": sequence_parallel,
            "tp_group": ranks.group,
            "tp_size": ranks.size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype,
        }
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
            "return_input": return_input,
        }
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        columns = {**linear, "init_method": init_method, "parallel_mode": column}
        columns |= asked.arguments("qkv")
        self._add_projections(whole, fuse_qkv_params, norm, columns)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.layout.size,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            sequence_parallel=sequence_parallel,
            tp_size=ranks.size,
            get_rng_state_tracker=get_rng_state_tracker,
            tp_group=ranks.group,
            layer_number=self.layer_number,
            attention_type=attention_type,
            bottom_right_diagonal=bottom_right_diagonal,
            softmax_type=softmax_type,
            name=f"{self.name}.core_attention",
        ).to(default_device(device))
        self.proj = Linear(
            whole.query_features,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            parallel_mode=row,
            name=f"{self.name}.proj",
            **linear,
            **asked.arguments("proj"),
        )
        self._add_parts(qkv_format, rotary_pos_interleaved)
        self.q_norm, self.k_norm = head_norms(self, qk_norm_type, qk_norm_eps, params_dtype, device)

    def _add_parts(self, qkv_format: str, interleaved: bool) -> None:
        cross = self.attention_type == "cross"
        self._rotation = Rotation(self.layout, qkv_format, interleaved, cross)
        self._split_qkv = Heads(("query", "key", "value"), self.layout)
        self._split_query = Heads(("query",), self.layout)
        self._split_kv = Heads(("key", "value"), self.layout)

    def _add_projections(
        self, whole: HeadLayout, fused: bool, norm: dict[str, Any], linear: dict[str, Any]
    ) -> None:
        """Register the projections of the input, under the names that checkpoints have."""
        query, key = whole.query_features, whole.key_features
        parts = whole.split(fused)
        if self.attention_type == "cross":
            if self.input_layernorm:
                self._add("layernorm_query", query, None if fused else ("query",), norm, linear)
            else:
                self._add("query_layer", query, None, None, linear)
            pair = ("key", "value") if not fused else parts and parts[1:]
            self._add("key_value", 2 * key, pair, None, linear)
        elif self.input_layernorm:
            self._add("layernorm_qkv", query + 2 * key, parts, norm, linear)
        else:
            self._add("qkv", query + 2 * key, parts, None, linear)

    def _add(
        self,
        attribute: str,
        features: int,
        split: Any,
        norm: dict[str, Any] | None,
        linear: dict[str, Any],
    ) -> None:
        module = Linear if norm is None else LayerNormLinear
        arguments = {**linear, **(norm or {}), "parameters_split": split}
        name = f"{self.name}.{attribute}"
        setattr(self, attribute, module(self.hidden_size, features, name=name, **arguments))

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks that share sequences, see `DotProductAttention`."""
        core = self.core_attention
        core.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self._rotation.set_context(core.context)

    @names_layer
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: AttentionMask | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: RotaryAngles | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        **core: Any,
    ) -> Any:
        """Compute attention, with the projections before and after it.

        Args:
            hidden_states: `[sequence, batch, hidden_size]`, or as `qkv_format` says.
            attention_mask: see `DotProductAttention.forward`.
            encoder_output: input of the key and value projections in cross attention.
            attn_mask_type: overrides the constructor's.
            window_size: overrides the constructor's.
            is_first_microbatch: see `Linear.forward`.
            checkpoint_core_attention: see `DotProductAttention.forward`.
            inference_params: see `InferenceParams`; rotary angles start at the new tokens. Cross
                attention caches nothing, and uses it only for the positions of queries; it then
                takes no causal mask type and no window.
            rotary_pos_emb: angles of `RotaryPositionEmbedding`, or a pair for queries and keys.
            core_attention_bias_type: see `DotProductAttention.forward`.
            core_attention_bias: see `DotProductAttention.forward`.
            alibi_slopes: see `DotProductAttention.forward`.
            fast_zero_fill: without effect.
            cu_seqlens_q: see `DotProductAttention.forward`.
            cu_seqlens_kv: see `DotProductAttention.forward`.
            cu_seqlens_q_padded: see `DotProductAttention.forward`.
            cu_seqlens_kv_padded: see `DotProductAttention.forward`.
            core: `max_seqlen_q`, `max_seqlen_kv`, `bottom_right_diagonal`, `pad_between_seqs` and
                `num_splits` of `DotProductAttention.forward`.

        Returns:
            `out[, bias][, norm output or input]`, as the `return_` arguments say.

        Raises:
            ValueError: see `DotProductAttention.forward`; no `encoder_output` in cross attention.
            TypeError: unknown keywords; see `DotProductAttention.forward`.
        """
        check_keywords(MultiheadAttention.forward, core, _CORE)
        check_hidden(self, "hidden_states", hidden_states, self.hidden_size, self.qkv_format)
        values: tuple[torch.Tensor, ...] = (hidden_states,)
        if self.attention_type == "cross":
            if encoder_output is None:
                raise ValueError(
                    "[MultiheadAttention] expected encoder_output with attention_type 'cross', got"
                    " None"
                )
            check_hidden(self, "encoder_output", encoder_output, self.hidden_size, self.qkv_format)
            values = (hidden_states, encoder_output)
            if inference_params is not None:
                check_cross(self.core_attention, attn_mask_type, window_size)
        arguments = explicit_arguments(
            attention_mask=attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            **core,
        )
        return run_layer(self, values, arguments)

    def flow_key(self) -> Hashable:
        """What `data_flow` depends on beside its arguments."""
        return self.qk_norm_before_rope

    def flow_of_call(
        self,
        flow: Flow,
        hidden_states: Any,
        attention_mask: Any = None,
        encoder_output: Any = None,
        **arguments: Any,
    ) -> Any:
        """What a call adds to the flow of a larger layer."""
        values = (hidden_states, encoder_output)[: 1 if self.attention_type == "self" else 2]
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        return self.data_flow(flow, values, arguments)

    def data_flow(self, flow: Flow, values: Sequence[Any], arguments: dict[str, Any]) -> Any:
        """What the layer does, see `chain.flow`: from hidden states (and encoder output) to output.

        Args:
            flow: runs the parts of the layer, or lists their stages.
            values: hidden states, and in cross attention the encoder output.
            arguments: those of `forward` that differ from defaults; for `adds` see `call_adding`.
        """
        flow.admit(is_recorded_on)
        core = dict(arguments)
        microbatch, adds = core.pop("is_first_microbatch", None), core.pop("adds", False)
        mask, angles = core.pop("attention_mask", None), core.pop("rotary_pos_emb", None)
        modules: dict[str, Any] = self._modules  # `self.q_norm` would cost a microsecond
        rotary = self._rotation.arguments(angles, core)
        if self.attention_type == "cross":
            core.pop("inference_params", None)
        normalizes_first = self.qk_norm_before_rope and modules.get("q_norm") is not None
        early = self.attention_type == "self" and not normalizes_first
        early = early and self._rotation.of_projection.takes(rotary)
        query, key, value, *tap = self._project(flow, values, microbatch, rotary if early else ())
        if self.qk_norm_before_rope:
            query, key = normalized_heads(flow, modules, query, key)
        if rotary and not early:
            query, key = flow.run(self._rotation, query, key, *rotary)
        if not self.qk_norm_before_rope:
            query, key = normalized_heads(flow, modules, query, key)
        context = flow.call(modules["core_attention"], query, key, value, mask, **core)
        if adds:
            return call_adding(flow, modules["proj"], (*tap, values[0])[0], context, microbatch)
        out = flow.call(modules["proj"], context, microbatch)
        if not tap:
            return out
        return (*out, *tap) if self.return_bias else (out, *tap)

    def _project(
        self, flow: Flow, values: Sequence[Any], microbatch: Any, rotary: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Query, key, value, and the norm's output or input if the layer returns it."""
        own, modules = self.attention_type == "self", self._modules
        normed, plain = ("layernorm_qkv", "qkv") if own else ("layernorm_query", "query_layer")
        module: Any = modules[normed if self.input_layernorm else plain]
        out = flow.call(module, values[0], microbatch)
        tapped = self.input_layernorm and len(module.chain.outputs) > 1
        out, *tap = out if tapped else (out,)
        if own:
            if rotary:
                out = flow.run(self._rotation.of_projection, out, *rotary[:2], rotary[4])
            return (*flow.run(self._split_qkv, out), *tap)
        query = flow.run(self._split_query, out)
        key_value = flow.call(modules["key_value"], values[1], microbatch)
        return (query, *flow.run(self._split_kv, key_value), *tap)
