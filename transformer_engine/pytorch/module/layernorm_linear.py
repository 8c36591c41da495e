"""`LayerNormLinear`: a norm and a Linear in one chain.

Under delayed scaling the kernel of the norm writes the FP8 input of the GEMM. Under current scaling
it finds the scale with which its output is then cast. Both save a pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.chain.stage import Parameters
from transformer_engine.pytorch.module.linear import SingleGemmModule
from transformer_engine.pytorch.module.norms import (
    NormalizesFirst,
    check_normalization,
    norm_parameters,
)
from transformer_engine.pytorch.module.parallel_mode import parallel_mode_of
from transformer_engine.pytorch.module.parameters import (
    InitMethod,
    ParameterSet,
    Split,
    default_init_method,
    names_in,
    params_dtype_of,
    tensors_of,
)
from transformer_engine.pytorch.module.settings import setting


@joins_chains
class LayerNormLinear(NormalizesFirst, SingleGemmModule):
    """Applies layer normalisation followed by a linear transformation.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        eps: added to the variance.
        bias: learn an additive bias.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        init_method: called as `init_method(weight)`; None is a normal with deviation 0.023.
        get_rng_state_tracker: returns the tracker under which weights are initialised.
        return_layernorm_output: also return the output of the norm.
        return_layernorm_output_gathered: with `sequence_parallel`, return the norm's output for
            the tokens of all ranks.
        return_input: also return the input, for a residual connection: the gradient that comes back
            on it is added inside the norm's backward. Not with `return_layernorm_output`.
        parameters_split: see `Linear`.
        zero_centered_gamma: start gamma at 0 and multiply by `1 + gamma`.
        device: device of the parameters; None is cuda where there is one, else cpu; `"meta"` defers
            initialisation to `reset_parameters`.
        sequence_parallel: outside the parallel region each rank has its part of the tokens, along
            the first axis; they are gathered before the column-parallel GEMM.
        tp_group: tensor parallel group; None where `set_tensor_parallel_group` gives it before the
            first forward.
        tp_size: how many ranks that group has.
        parallel_mode: None or `"column"`: each rank has some of the outputs. `"row"` is not
            possible, because the norm needs all features of a token.
        fuse_wgrad_accumulation: add weight gradients to `weight.main_grad`; not with a weight
            that `parameters_split` splits.
        delay_wgrad_compute: the backward computes only the gradient of the input; `backward_dw`
            computes those of weights and biases, and must be called once for each backward.
        return_bias: return the bias instead of adding it.
        params_dtype: dtype of the parameters; None is torch's default dtype.
        dtype: torch's spelling of `params_dtype`.
        name: for messages, reports and the debugger.
        others: arguments that tune overlap of communication; no effect on one rank.

    Raises:
        ValueError: invalid sizes, splits, modes, norms or devices; a negative `eps`.
        TypeError: unknown arguments; sizes, dtypes, devices, names or functions of other types.
        RuntimeError: a GPU that torch does not see.
        NotImplementedError: `parallel_mode="row"`.

    >>> import torch
    >>> LayerNormLinear(16, 32, device="cpu")(torch.ones(4, 16)).shape
    torch.Size([4, 32])
    """

    _shown = ("in_features", "out_features", "use_bias", "normalization")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        init_method: InitMethod | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Split = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
        return_input: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(1, name, in_features=in_features, out_features=out_features)
        self._keep_ranks(tp_group, tp_size, sequence_parallel, parallel_mode, others)
        self.delay_wgrad_compute = delay_wgrad_compute
        self._keep_sizes(in_features, out_features, bias, parameters_split)
        self.eps = eps
        self.normalization = check_normalization(normalization, "LayerNormLinear")
        self.zero_centered_gamma = zero_centered_gamma
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._returns_input = return_input
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._parameter_set = ParameterSet(get_rng_state_tracker)
        norm = norm_parameters(
            normalization, (in_features,), zero_centered_gamma, sequence_parallel, "layer_norm_"
        )
        self._norm_names = names_in(norm, "layer_norm_weight", "layer_norm_bias")
        linear = self._split.specs(in_features, init_method or default_init_method)
        self._parameter_set.create(
            self, norm + linear, params_dtype_of(params_dtype, dtype), device
        )
        if normalization == "RMSNorm":
            self.layer_norm_bias = None
        if not bias:
            self.bias = None
        self.chain = self._build_chain()

    def _checked_mode(self, parallel_mode: str | None) -> str | None:
        mode = parallel_mode_of(parallel_mode, "LayerNormLinear")
        if mode == "row" and self.ranks.size > 1:
            raise NotImplementedError(
                "[LayerNormLinear] expected parallel_mode None or 'column', got 'row': its norm "
                f"needs all features of a token on each rank (layer {self.name})"
            )
        return mode

    parallel_mode: str | None = setting(_checked_mode)

    def _build_chain(self) -> Chain:
        norm, gathers = self._norm_stage(self.parallel_mode)
        return Chain.of(norm, *self._gemm_stages(gathers))

    def chain_parameters(self) -> tuple[Parameters, torch.Tensor | None]:
        """See `TransformerEngineBaseModule`."""
        weight, bias = self._split.of(self)
        applied = None if self.return_bias else bias
        return (*tensors_of(self, self._norm_names), weight, applied), bias

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Normalise, then apply the linear transformation.

        Args:
            inp: `(..., in_features)`, fp32, fp16 or bf16.
            is_first_microbatch: see `Linear.forward`.
            fp8_output: see `Linear.forward`.
            fp8_grad: see `Linear.forward`.

        Returns:
            `out[, bias][, norm output or input]`, as the `return_` arguments say.

        Raises:
            ValueError: a last size other than `in_features`; an input on another device.
            TypeError: not a tensor; a dtype that GEMMs do not take, or other than the parameters'.
            NotImplementedError: `fp8_output` or `fp8_grad` is True.
        """
        if fp8_output or fp8_grad:
            self._refuse_codes(fp8_output, fp8_grad)
        parameters, bias = self.chain_parameters()
        return self._call(inp, self.in_features, parameters, bias, is_first_microbatch)
