"""`LayerNormMLP`: norm, FC1, activation and FC2 in one chain.

Under delayed scaling the kernels of the norm and of the activation write the FP8 inputs of the
GEMMs. Under current scaling they find the scales with which their outputs are then cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.chain.part import Incoming, Planned
from transformer_engine.pytorch.chain.stage import Parameters
from transformer_engine.pytorch.chain.stages import Activation
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.kernels.activation import (
    activation_kind,
    activation_parameters,
    is_gated,
)
from transformer_engine.pytorch.module.arguments import tensor_parallel
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.norms import (
    NormalizesFirst,
    check_normalization,
    norm_parameters,
)
from transformer_engine.pytorch.module.overlap_arguments import (
    keep_overlap,
    overlap_arguments,
    request_overlap,
)
from transformer_engine.pytorch.module.parallel_mode import SharedLinear
from transformer_engine.pytorch.module.parameters import (
    InitMethod,
    ParameterSet,
    ParameterSpec,
    default_init_method,
    names_in,
    params_dtype_of,
    tensors_of,
)
from transformer_engine.pytorch.module.settings import flag_setting, setting
from transformer_engine.pytorch.recompute.checkpoint import checkpoint


@joins_chains
class LayerNormMLP(NormalizesFirst, TransformerEngineBaseModule):
    """Applies layer normalisation followed by a two-layer perceptron.

    Args:
        hidden_size: size of each input and output sample.
        ffn_hidden_size: size between the two layers.
        eps: added to the variance.
        bias: learn additive biases.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        activation: gelu, geglu, qgelu, qgeglu, relu, reglu, srelu (or squared_relu), sreglu, silu,
            swiglu, clamped_swiglu or glu.
        activation_params: settings of clamped_swiglu, see `ops.ClampedSwiGLU`: a dict with `limit`
            (7.0), `alpha` (1.702) and `glu_linear_offset` (1.0).
        init_method: for FC1's weight; None is a normal with deviation 0.023.
        output_layer_init_method: for FC2's weight; likewise.
        get_rng_state_tracker: returns the tracker under which weights are initialised.
        return_layernorm_output: also return the output of the norm.
        return_layernorm_output_gathered: with `sequence_parallel`, return the norm's output for
            the tokens of all ranks.
        return_input: also return the input, for a residual connection: the gradient that comes back
            on it is added inside the norm's backward. Not with `return_layernorm_output`.
        zero_centered_gamma: start gamma at 0 and multiply by `1 + gamma`.
        device: device of the parameters; None is cuda where there is one, else cpu; `"meta"` defers
            initialisation to `reset_parameters`.
        set_parallel_mode: the ranks of `tp_group` share the layer: FC1 is column parallel, FC2 row
            parallel. Without this flag every rank has the whole layer.
        sequence_parallel: outside the parallel region each rank has its part of the tokens, along
            the first axis; they are gathered before FC1, and FC2's sums are scattered.
        tp_group: tensor parallel group; None where `set_tensor_parallel_group` gives it before the
            first forward.
        tp_size: how many ranks that group has.
        fuse_wgrad_accumulation: add weight gradients to `weight.main_grad`.
        delay_wgrad_compute: the backward computes only the gradient of the input; `backward_dw`
            computes those of weights and biases, and must be called once for each backward.
        return_bias: return FC2's bias instead of adding it.
        params_dtype: dtype of the parameters; None is torch's default dtype.
        dtype: torch's spelling of `params_dtype`.
        seq_length: accepted for older scripts (nothing is compiled just in time).
        micro_batch_size: likewise.
        name: for messages, reports and the debugger; the GEMMs are `<name>.fc1`, `<name>.fc2`.
        checkpoint: save only the input; the backward computes the rest again. Gradients are the
            same, bit for bit. It may be set at any time.
        others: arguments that tune overlap of communication; no effect on one rank.

    Raises:
        ValueError: invalid norms, sizes, devices or parameters of activations; a negative `eps`.
        TypeError: unknown arguments; sizes, numbers, dtypes, devices, names or functions of other
            types.
        RuntimeError: a GPU that torch does not see.
        NotImplementedError: unknown activations.

    >>> import torch
    >>> LayerNormMLP(16, 64, device="cpu")(torch.ones(4, 16)).shape
    torch.Size([4, 16])
    """

    _shown = ("hidden_size", "ffn_hidden_size", "use_bias", "normalization", "activation")

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        name: str | None = None,
        return_input: bool = False,
        checkpoint: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(2, name, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        asked = overlap_arguments(LayerNormMLP, others)
        self.ranks = tensor_parallel(self, tp_group, tp_size, sequence_parallel, set_parallel_mode)
        self.sequence_parallel = sequence_parallel
        keep_overlap(self, asked, others, "column", "row")
        kind = activation_kind(activation)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.eps = eps
        self.normalization = check_normalization(normalization, "LayerNormMLP")
        self.activation, self._activation_params = activation, activation_params
        if isinstance(activation_params, Mapping):
            self._activation_params = dict(activation_params)
        self.zero_centered_gamma = zero_centered_gamma
        self.use_bias = bias
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._returns_input, self.fuse_wgrad_accumulation = return_input, fuse_wgrad_accumulation
        self.checkpoint, self.set_parallel_mode = checkpoint, set_parallel_mode
        halves = [ffn_hidden_size] * (2 if is_gated(kind) else 1)
        self.delay_wgrad_compute = delay_wgrad_compute
        self._fc1 = SharedLinear("column", self.ranks, halves, delay_wgrad_compute)
        self._fc2 = SharedLinear("row", self.ranks, delays=delay_wgrad_compute)
        self.fc2_features = self._fc2.inputs("ffn_hidden_size", ffn_hidden_size)
        self.fc1_features = self.fc2_features * len(halves)

        norm = norm_parameters(
            normalization, (hidden_size,), zero_centered_gamma, sequence_parallel, "layer_norm_"
        )
        self._parameter_set = ParameterSet(get_rng_state_tracker)
        specs = norm + self._linear_specs(init_method, output_layer_init_method)
        self._names = names_in(
            specs,
            *("layer_norm_weight", "layer_norm_bias"),
            *("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
        )
        self._parameter_set.create(self, specs, params_dtype_of(params_dtype, dtype), device)
        if normalization == "RMSNorm":
            self.layer_norm_bias = None
        if not bias:
            self.fc1_bias = self.fc2_bias = None
        self.chain = self._build_chain()

    def _checked_activation(self, activation: str) -> str:
        gated, features = is_gated(activation_kind(activation)), self.__dict__.get("fc1_features")
        if features is not None and gated != (features > self.fc2_features):
            raise ValueError(
                f"[LayerNormMLP] expected {'an' if gated else 'a gated'} activation for the sizes"
                f" of FC1, got {activation!r} (layer {self.name})"
            )
        return activation

    activation: str = setting(_checked_activation)
    fuse_wgrad_accumulation: bool = flag_setting()

    def _build_chain(self) -> Chain:
        request_overlap(self, "column", "row")
        norm, gathers = self._norm_stage("column")
        kind, fuse = activation_kind(self.activation), self.fuse_wgrad_accumulation
        return Chain.able_to_add(
            norm,
            *self._fc1.stages(0, self.name, fuse, "fc1", gathers),
            Activation(kind, activation_parameters(kind, self._activation_params, "LayerNormMLP")),
            *self._fc2.stages(1, self.name, fuse, "fc2"),
        )

    def _linear_specs(
        self, first: InitMethod | None, second: InitMethod | None
    ) -> list[ParameterSpec]:
        (out1, in1), (out2, in2) = self._gemm_weights()
        first, second = first or default_init_method, second or default_init_method
        specs = [
            self._fc1.weight("fc1_weight", (out1, in1), first),
            self._fc1.bias("fc1_bias", out1),
            self._fc2.weight("fc2_weight", (out2, in2), second),
            self._fc2.bias("fc2_bias", out2, self.set_parallel_mode),
        ]
        return specs if self.use_bias else specs[::2]

    def _gemm_weights(self) -> list[tuple[int, int]]:
        return [(self.fc1_features, self.hidden_size), (self.hidden_size, self.fc2_features)]

    def _weights(self) -> list[torch.Tensor]:
        return tensors_of(self, ("fc1_weight", "fc2_weight"))  # type: ignore[return-value]

    def gemm_parameters(self) -> list[tuple[list[str], list[str]]]:
        """See `DelaysGradients`."""
        return [([f"fc{i}_weight"], [f"fc{i}_bias"] * self.use_bias) for i in (1, 2)]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Normalise, then apply the perceptron.

        Args:
            inp: `(..., hidden_size)`, fp32, fp16 or bf16.
            is_first_microbatch: see `Linear.forward`.

        Returns:
            `out[, fc2_bias][, norm output or input]`, as the `return_` arguments say.

        Raises:
            ValueError: a last size other than `hidden_size`; an input on another device.
            TypeError: not a tensor; a dtype that GEMMs do not take, or other than the parameters'.
        """
        return self._run(inp, is_first_microbatch)

    def call_adding(
        self,
        residual: torch.Tensor | None,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """The sum of the output and the residual, rounded once; see `chain.flow`.

        If `forward` also returns the input or the norm's output, that is the residual.
        """
        return self._run(inp, is_first_microbatch, True, residual)

    def _run(self, inp: torch.Tensor, is_first_microbatch: bool | None, *how: Any) -> Any:
        # With the parameters of this call for its recompute: `functional_call` restores others.
        arguments = (inp, self.hidden_size, *self.chain_parameters(), is_first_microbatch, *how)
        if self.checkpoint and torch.is_grad_enabled() and not exporting():
            return checkpoint(
                self._call,
                *arguments,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing in here draws random numbers
            )
        return self._call(*arguments)

    def plan_call(
        self, values: Incoming, is_first_microbatch: bool | None = None, adds: bool = False
    ) -> Planned | None:
        """See `TransformerEngineBaseModule`."""
        return None if self.checkpoint else super().plan_call(values, is_first_microbatch, adds)

    def chain_parameters(self) -> tuple[Parameters, torch.Tensor | None]:
        """See `TransformerEngineBaseModule`."""
        *parameters, bias = tensors_of(self, self._names)
        return (*parameters, None if self.return_bias else bias), bias
