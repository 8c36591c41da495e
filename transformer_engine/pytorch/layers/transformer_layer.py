"""TransformerLayer: attention and MLP blocks, each ending in residual + dropout(output).

    encoder     x -> self_attention -> + -> layernorm_mlp -> +
    decoder     x -> self_attention -> + -> inter_attention -> + -> layernorm_mlp -> +
    parallel    x -> (self_attention + layernorm_mlp) -> +

GEMMs add their biases in the epilogue, at no cost. The gradient of a bias is summed in the pass
that quantises the output gradient of the GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.attention.core.call import AttentionMask
from transformer_engine.pytorch.attention.core.query_key import RotaryAngles
from transformer_engine.pytorch.attention.masks.masks import Window
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.chain.flow import Flow, FlowModule
from transformer_engine.pytorch.chain.run_layer import run_layer
from transformer_engine.pytorch.dtypes import in_autocast_dtype
from transformer_engine.pytorch.layers.checks import (
    BATCH_DIM,
    SEQUENCES,
    check_inputs,
    check_layer,
    check_mask,
)
from transformer_engine.pytorch.layers.decoder import arguments_of_decoder
from transformer_engine.pytorch.layers.drop_path import DropPath
from transformer_engine.pytorch.layers.settings import LayerSettings
from transformer_engine.pytorch.module.arguments import check_keywords
from transformer_engine.pytorch.module.inputs import explicit_arguments, names_layer
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.names import layer_name
from transformer_engine.pytorch.module.overlap_arguments import overlap_arguments
from transformer_engine.pytorch.module.parameters import InitMethod
from transformer_engine.pytorch.module.residual import RESIDUAL, Residual, call_adding
from transformer_engine.pytorch.module.rmsnorm import RMSNorm


class TransformerLayer(LayerSettings, FlowModule):
    """One layer of a transformer: self-attention, cross-attention in a decoder, and an MLP.

    Args:
        hidden_size: size of each input and output sample.
        ffn_hidden_size: size between the two layers of the MLP.
        num_attention_heads: query heads.
        num_gqa_groups: key and value heads; None for as many as query heads.
        layernorm_epsilon: added to the variance.
        hidden_dropout: probability of dropping an element at the end of a block in training.
        attention_dropout: probability of dropping an attention weight in training.
        init_method: for QKV and FC1 weights; None is a normal with deviation 0.023.
        output_layer_init_method: for PROJ and FC2 weights; likewise.
        layer_number: number of the layer, from 1.
        kv_channels: size of a head; None is `hidden_size / num_attention_heads`.
        self_attn_mask_type: see `DotProductAttention`; `forward` may override it.
        window_size: see `DotProductAttention`; `forward` may override it.
        tp_group: tensor parallel group; None where `set_tensor_parallel_group` gives it before the
            first forward.
        tp_size: how many ranks that group has.
        params_dtype: dtype of the parameters; None is torch's default dtype.
        get_rng_state_tracker: returns the tracker of initialisation and attention dropout.
        fuse_wgrad_accumulation: add weight gradients to `weight.main_grad`; needs
            `fuse_qkv_params`.
        seq_length: with `sequence_parallel`, the sequence length of the `tp_size` parts together.
        micro_batch_size: without effect.
        sequence_parallel: input and output are this rank's part of the tokens, see `Linear`. Then
            run the layer in a fork of the RNG tracker, so that ranks draw different dropout masks.
        apply_residual_connection_post_layernorm: take residuals from the output of the norms.
        output_layernorm: normalise the output instead of the input.
        parallel_attention_mlp: attention and MLP read the same input, and their outputs are added.
        layer_type: `encoder`, or `decoder` with cross-attention.
        drop_path_rate: probability of leaving out a sample's attention or MLP block in training.
        set_parallel_mode: the ranks of `tp_group` share the layer: heads, QKV and FC1 by columns,
            PROJ and FC2 by rows. Without this flag every rank has the whole layer.
        fuse_qkv_params: one parameter for queries, keys and values instead of three.
        zero_centered_gamma: start gamma at 0 and multiply by `1 + gamma`.
        qkv_weight_interleaved: order of the rows of the fused weight: for each group those of its
            queries, key and value; if False, those of all queries, of all keys, of all values. It
            is taken as False without `fuse_qkv_params`.
        bias: learn additive biases.
        activation: activation of the MLP, see `LayerNormMLP`.
        activation_params: settings of `clamped_swiglu`, see `LayerNormMLP`.
        normalization: `LayerNorm` or `RMSNorm`.
        device: device of the parameters; None is cuda where there is one, else cpu.
        attn_input_format: `sbhd`, `bshd` or `thd`, that is `[sequence, batch, hidden_size]`,
            `[batch, sequence, hidden_size]` or `[tokens, hidden_size]`.
        bottom_right_diagonal: see `DotProductAttention`.
        enc_dec_attn_mask_type: mask type of cross-attention; None is `padding` for a pair of masks,
            `arbitrary` for one, `no_mask` without.
        enc_dec_window_size: window of cross-attention.
        enc_dec_bottom_right_diagonal: see `DotProductAttention`.
        rotary_pos_interleaved: rotate pairs of neighbours (0, 1), (2, 3), ... of a head; if False,
            pairs (0, size / 2), (1, size / 2 + 1), ...
        qk_norm_type: norm of the heads of queries and keys, see `MultiheadAttention`.
        qk_norm_eps: the eps of this norm.
        qk_norm_before_rope: see `MultiheadAttention`.
        softmax_type: see `DotProductAttention`.
        name: name of the layer; its children are `<name>.self_attention`, ...
        others: arguments that tune overlap of communication; no effect on one rank.

    Raises:
        ValueError: invalid sizes, mask types or settings; settings that cannot be combined; sizes
            that ranks cannot share.
        TypeError: unknown arguments.
        NotImplementedError: unknown activations.

    Example:
        >>> layer = TransformerLayer(64, 256, 4, device="cpu")
        >>> layer(torch.randn(8, 2, 64)).shape
        torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        *,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        rotary_pos_interleaved: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        overlap = overlap_arguments(TransformerLayer, others, whole=True).arguments("")
        self.hidden_size = hidden_size
        self.layer_number = layer_number
        self.layer_type = layer_type
        self.hidden_dropout = hidden_dropout
        self.drop_path_rate = drop_path_rate
        self.self_attn_mask_type = self_attn_mask_type
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.sequence_parallel, self.seq_length = sequence_parallel, seq_length
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.attn_input_format = attn_input_format
        self.name = layer_name(name)
        check_layer(self, ffn_hidden_size, fuse_wgrad_accumulation and not fuse_qkv_params)
        shared: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "get_rng_state_tracker": get_rng_state_tracker,
            "device": device,
            "set_parallel_mode": set_parallel_mode,
            "sequence_parallel": sequence_parallel,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "return_input": not parallel_attention_mlp,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            **overlap,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": num_attention_heads,
            "num_gqa_groups": num_gqa_groups,
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "qkv_format": attn_input_format,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
            name=f"{self.name}.self_attention",
            **heads,
            **shared,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                attn_mask_type=enc_dec_attn_mask_type or "no_mask",
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                attention_type="cross",
                input_layernorm=True,
                name=f"{self.name}.inter_attention",
                **heads,
                **shared,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            name=f"{self.name}.layernorm_mlp",
            **shared,
        )
        self._dropout = Residual(with_residual=False)
        self.drop_path = DropPath(drop_path_rate, BATCH_DIM[attn_input_format])
        if output_layernorm:
            norm = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = norm(
                hidden_size,
                eps=layernorm_epsilon,
                sequence_parallel=sequence_parallel,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks that share sequences, see `DotProductAttention`."""
        child: Any
        for child in self.children():
            if hasattr(child, "set_context_parallel_group"):
                child.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    @names_layer
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: AttentionMask | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: AttentionMask | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: RotaryAngles | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        *,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        **sequences: Any,
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            hidden_states: `[sequence, batch, hidden_size]`, or as `attn_input_format` says.
            attention_mask: see `DotProductAttention.forward`.
            self_attn_mask_type: overrides the constructor's.
            window_size: overrides the constructor's.
            encoder_output: what cross-attention attends to in a decoder.
            enc_dec_attn_mask: mask of cross-attention, see `DotProductAttention.forward`.
            is_first_microbatch: see `Linear.forward`.
            checkpoint_core_attention: see `DotProductAttention.forward`.
            inference_params: see `InferenceParams`; only self-attention keeps a cache.
            rotary_pos_emb: angles of `RotaryPositionEmbedding`, or a pair for queries and keys.
            core_attention_bias_type: see `DotProductAttention.forward`.
            core_attention_bias: see `DotProductAttention.forward`.
            alibi_slopes: see `DotProductAttention.forward`.
            fast_zero_fill: without effect.
            bottom_right_diagonal: overrides the constructor's.
            enc_dec_attn_mask_type: overrides the constructor's; not causal with `inference_params`.
            enc_dec_window_size: overrides the constructor's; none with `inference_params`.
            enc_dec_bottom_right_diagonal: overrides the constructor's.
            sequences: `cu_seqlens_q`, `cu_seqlens_kv`, `cu_seqlens_q_padded`,
                `cu_seqlens_kv_padded`, `max_seqlen_q`, `max_seqlen_kv` and `pad_between_seqs` of
                `DotProductAttention.forward`. In a decoder those of `kv` are of `encoder_output`;
                if `enc_dec_attn_mask` is given, cross-attention uses the mask instead of lengths.

        Returns:
            The shape and dtype of `hidden_states`; the dtype of `torch.autocast` where that is
            active.

        Raises:
            ValueError: another size of `hidden_states`; see `DotProductAttention.forward`.
            TypeError: unknown keywords; see `DotProductAttention.forward`.
        """
        check_keywords(TransformerLayer.forward, sequences, SEQUENCES)
        check_inputs(self, hidden_states, encoder_output, attention_mask, self_attn_mask_type)
        # The residual stream has the dtype of torch.autocast, too.
        hidden_states = in_autocast_dtype(hidden_states.contiguous())
        core = explicit_arguments(
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            **sequences,
        )
        if attention_mask is not None:
            core["attention_mask"] = attention_mask
        values: tuple[torch.Tensor, ...] = (hidden_states,)
        cross: dict[str, Any] = {}
        if self.layer_type == "decoder":
            core, cross = arguments_of_decoder(
                core,
                attention_mask=enc_dec_attn_mask,
                attn_mask_type=self._cross_mask_type(enc_dec_attn_mask, enc_dec_attn_mask_type),
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )
            if encoder_output is not None:
                values = (hidden_states, encoder_output)
        return run_layer(self, values, core, cross)

    def flow_key(self) -> Hashable:
        """What `data_flow` depends on beside its arguments."""
        if not self.training:
            return None
        return self.hidden_dropout, self.drop_path_rate

    def data_flow(
        self, flow: Flow, values: Sequence[Any], core: dict[str, Any], cross: dict[str, Any]
    ) -> Any:
        """The computation of the layer, written for `chain.flow`.

        `values` are the hidden states, in a decoder also the encoder output; `core` and `cross` are
        arguments of self-attention and cross-attention that differ from their defaults.
        """
        modules: dict[str, Any] = self._modules  # to read a module as attribute costs a microsecond
        (hidden_states, *encoder_output), microbatch = values, core.get("is_first_microbatch")
        ends = core.get("cu_seqlens_q_padded", core.get("cu_seqlens_q"))
        packed = ends if self.attn_input_format == "thd" else None
        others = dict(core)
        mask = others.pop("attention_mask", None)
        attention, mlp = modules["self_attention"], modules["layernorm_mlp"]
        if self.parallel_attention_mlp:
            block = flow.call(attention, hidden_states, mask, **others)
            block = flow.run(RESIDUAL, flow.call(mlp, hidden_states, microbatch), block)
            return self._join(flow, block, hidden_states, packed)
        hidden_states = self._block(flow, attention, packed, True, hidden_states, mask, **others)
        if self.layer_type == "decoder":
            attention, others = modules["inter_attention"], dict(cross)
            arguments = (hidden_states, others.pop("attention_mask", None), *encoder_output)
            hidden_states = self._block(flow, attention, None, False, *arguments, **others)
        hidden_states = self._block(flow, mlp, packed, True, hidden_states, microbatch)
        if self.output_layernorm:
            hidden_states = flow.call(modules["layernorm"], hidden_states)
        return hidden_states

    def _block(
        self, flow: Flow, module: Any, packed: Any, drop_path: bool, *arguments: Any, **others: Any
    ) -> Any:
        """A block, and its end, see `_join`; the first of `arguments` are the hidden states."""
        drops = self.hidden_dropout > 0.0 or (drop_path and self.drop_path_rate > 0.0)
        if not (drops and self.training):
            return call_adding(flow, module, None, *arguments, **others)
        block = flow.call(module, *arguments, **others)
        return self._join(flow, block, arguments[0], packed, drop_path)

    def _join(
        self, flow: Flow, block: Any, residual: Any, packed: Any = None, drop_path: bool = True
    ) -> Any:
        """End a block: residual + drop_path(dropout(output)).

        A block that begins with a norm returns `(output, residual)`: the residual is the norm's
        input, or the norm's output with `apply_residual_connection_post_layernorm`.
        """
        out, residual = block if isinstance(block, tuple) else (block, residual)
        p = self.hidden_dropout if self.training else 0.0
        if not (drop_path and self.drop_path_rate > 0.0 and self.training):
            return flow.run(RESIDUAL, out, residual, p)
        branch = flow.run(self._dropout, out, p) if p else out
        branch = flow.call(self._modules["drop_path"], branch, packed)
        return flow.run(RESIDUAL, branch, residual)

    def _cross_mask_type(self, mask: AttentionMask | None, override: str | None) -> str:
        """Mask type of cross-attention: the explicit one, else the one that the mask implies."""
        kind = override or self.enc_dec_attn_mask_type
        if kind is None:
            if mask is None:
                return "no_mask"
            kind = "padding" if isinstance(mask, tuple | list) else "arbitrary"
        check_mask(mask, kind, "enc_dec_attn_mask", "enc_dec_attn_mask_type")
        return kind
