"""`Linear`: y = x . A^T + b, in FP8 under `fp8_autocast`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.chain.stage import Parameters, Stage
from transformer_engine.pytorch.module.arguments import refuse_others, tensor_parallel
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.overlap_arguments import (
    keep_overlap,
    overlap_arguments,
    request_overlap,
)
from transformer_engine.pytorch.module.parallel_mode import SharedLinear, parallel_mode_of
from transformer_engine.pytorch.module.parameters import (
    InitMethod,
    ParameterSet,
    Split,
    SplitLinearParameters,
    default_init_method,
    params_dtype_of,
    sections_of,
    split_sizes,
)
from transformer_engine.pytorch.module.settings import flag_setting, setting


class SingleGemmModule(TransformerEngineBaseModule):
    """A module of one GEMM, whose weight and bias may be split into several parameters."""

    in_features: int
    out_features: int
    parallel_mode: str | None
    use_bias: bool
    _split: SplitLinearParameters
    _joins = True  # see `SharedLinear`

    def _keep_ranks(
        self,
        tp_group: Any,
        tp_size: int,
        sequence_parallel: bool,
        parallel_mode: str | None,
        others: dict[str, Any],
    ) -> None:
        """Keep which ranks share the GEMM, and how they communicate."""
        asked = overlap_arguments(type(self), others)
        self.ranks = tensor_parallel(self, tp_group, tp_size, sequence_parallel)
        self.sequence_parallel, self.parallel_mode = sequence_parallel, parallel_mode
        keep_overlap(self, asked, others, self.parallel_mode)

    def _keep_sizes(self, in_features: int, out_features: int, bias: bool, split: Split) -> None:
        """Keep this rank's sizes, and into which parameters weight and bias are split."""
        ranks, delays = self.ranks, self.delay_wgrad_compute
        shared = SharedLinear(self.parallel_mode, ranks, sections_of(split), delays)
        self.in_features = shared.inputs("in_features", in_features)
        self.out_features = shared.outputs("out_features", out_features)
        self.use_bias = bias
        sizes = split_sizes(split, out_features, type(self).__name__)
        self._split = SplitLinearParameters(sizes, shared, out_features, bias)

    def _checked_fusing(self, fuse_wgrad_accumulation: bool) -> bool:
        names = self._split.weight_names
        if fuse_wgrad_accumulation and len(names) > 1:
            raise ValueError(
                f"[{type(self).__name__}] expected one weight with fuse_wgrad_accumulation=True,"
                f" got parameters_split into {', '.join(names)} (layer {self.name})"
            )
        return fuse_wgrad_accumulation

    fuse_wgrad_accumulation: bool = flag_setting(_checked_fusing)

    def _gemm_stages(
        self, gathered_tap: bool = False, save_original_input: bool = False
    ) -> list[Stage]:
        """The stages of the GEMM; see `SharedLinear.stages`."""
        mode, fuse = self.parallel_mode, self.fuse_wgrad_accumulation
        request_overlap(self, mode, named=True)
        shared = SharedLinear(mode, self.ranks, (), self.delay_wgrad_compute, self._joins)
        return shared.stages(0, self.name, fuse, "", gathered_tap, save_original_input)

    def _refuse_codes(self, fp8_output: bool, fp8_grad: bool) -> None:
        """Refuse results and gradients in FP8: the last stage of a chain leaves high precision."""
        asked = {"fp8_output": fp8_output, "fp8_grad": fp8_grad}
        refuse_others(type(self).__name__, self.name, asked, dict.fromkeys(asked, False))

    def _gemm_weights(self) -> list[tuple[int, int]]:
        return [(self.out_features, self.in_features)]

    def _weights(self) -> list[torch.Tensor]:
        return [self._split.of(self)[0]]

    def gemm_parameters(self) -> list[tuple[list[str], list[str]]]:
        """See `DelaysGradients`."""
        return [(self._split.weight_names, self._split.bias_names)]


@joins_chains
class Linear(SingleGemmModule):
    """Applies `y = x . A^T + b`; a drop-in replacement of `torch.nn.Linear`.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: learn an additive bias.
        init_method: called as `init_method(weight)`; None is a normal with deviation 0.023.
        get_rng_state_tracker: returns the tracker under which weights are initialised.
        parameters_split: names (equal parts) or name-to-size mapping that splits weight and bias
            along dim 0 into parameters `<name>_weight`, `<name>_bias`.
        device: device of the parameters; None is cuda where there is one, else cpu; `"meta"` defers
            initialisation to `reset_parameters`.
        sequence_parallel: outside the parallel region each rank has its part of the tokens, along
            the first axis; they are gathered before a column-parallel GEMM, and the sums of a
            row-parallel GEMM are scattered.
        tp_group: tensor parallel group; None where `set_tensor_parallel_group` gives it before the
            first forward.
        tp_size: how many ranks that group has.
        parallel_mode: `"column"`: each rank has some of the outputs; `"row"`: each has some of the
            inputs, and outputs are summed over the ranks; None: the ranks do not share the layer.
        fuse_wgrad_accumulation: add weight gradients to `weight.main_grad`; not with a weight
            that `parameters_split` splits.
        delay_wgrad_compute: the backward computes only the gradient of the input; `backward_dw`
            computes those of weights and biases, and must be called once for each backward.
        return_bias: return `(y without bias, bias)`.
        params_dtype: dtype of the parameters; None is torch's default dtype.
        dtype: torch's spelling of `params_dtype`.
        save_original_input: save the input itself for the backward, which casts it again, instead
            of its FP8 copy. This takes less memory where another module saves the input anyway.
            Not with delayed scaling. It may be set at any time.
        name: for messages, reports and the debugger.
        others: arguments that tune overlap of communication; no effect on one rank.

    Raises:
        ValueError: invalid sizes, splits, modes or devices.
        TypeError: unknown arguments; sizes, dtypes, devices, names or functions of other types.
        RuntimeError: a GPU that torch does not see.

    >>> import torch
    >>> Linear(16, 32, device="cpu")(torch.ones(4, 16)).shape
    torch.Size([4, 32])
    """

    _shown = ("in_features", "out_features", "use_bias")
    parallel_mode: str | None = setting(
        lambda module, mode: parallel_mode_of(mode, type(module).__name__)
    )
    save_original_input: bool = flag_setting()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_method: InitMethod | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        parameters_split: Split = None,
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
        save_original_input: bool = False,
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(1, name, in_features=in_features, out_features=out_features)
        self._keep_ranks(tp_group, tp_size, sequence_parallel, parallel_mode, others)
        self.delay_wgrad_compute = delay_wgrad_compute
        self._keep_sizes(in_features, out_features, bias, parameters_split)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        self._parameter_set = ParameterSet(get_rng_state_tracker)
        specs = self._split.specs(self.in_features, init_method or default_init_method)
        self._parameter_set.create(self, specs, params_dtype_of(params_dtype, dtype), device)
        if not bias:
            self.bias = None
        self.chain = self._build_chain()

    def _build_chain(self) -> Chain:
        stages = self._gemm_stages(save_original_input=self.save_original_input)
        return Chain.able_to_add(*stages)

    def chain_parameters(self) -> tuple[Parameters, torch.Tensor | None]:
        """See `TransformerEngineBaseModule`."""
        weight, bias = self._split.of(self)
        return (weight, None if self.return_bias else bias), bias

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the linear transformation.

        Args:
            inp: `(..., in_features)`, fp32, fp16 or bf16.
            is_first_microbatch: True casts the weight to FP8 and caches the result, False uses the
                cached one, None casts the weight for this call only. True in high precision drops
                the cached one; without one, False casts and caches as True. With
                `fuse_wgrad_accumulation`, True also begins a new sum in `main_grad`: the first
                backward of a use of the weight that comes after this call overwrites what is
                there, whichever call it belongs to, and the others add. A call without autograd,
                or whose results are dropped, begins nothing. In compiled code the backward of this
                call overwrites, so it must come before those of other uses. A callable of
                `make_graphed_callables` with `cache_quantized_params` fills `main_grad` with zeros
                in this call.
            fp8_output: False, the only value that is implemented; `ops.Quantize` casts a result.
            fp8_grad: False, the only value that is implemented.

        Returns:
            `(..., out_features)`, and with `return_bias` the bias (or None). With several ranks
            `out_features` is the rank's share of a column-parallel layer, and with
            `sequence_parallel` the first size is `tp_size` times as large, or as small.

        Raises:
            ValueError: a last size other than `in_features`; an input on another device.
            TypeError: not a tensor; a dtype that GEMMs do not take, or other than the parameters'.
            NotImplementedError: `fp8_output` or `fp8_grad` is True.
        """
        if fp8_output or fp8_grad:
            self._refuse_codes(fp8_output, fp8_grad)
        parameters, bias = self.chain_parameters()
        return self._call(inp, self.in_features, parameters, bias, is_first_microbatch)

    def call_adding(
        self, residual: torch.Tensor, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        """`residual + forward(inp)`, rounded once; see `chain.flow`."""
        parameters, bias = self.chain_parameters()
        features = self.in_features
        return self._call(inp, features, parameters, bias, is_first_microbatch, True, residual)
