"""`NormModule`, the base of LayerNorm and RMSNorm, and what modules with a norm share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.stages import Norm
from transformer_engine.pytorch.chain.stages.norm import tap_of
from transformer_engine.pytorch.dtypes import HIGH_PRECISION, autocast_dtype
from transformer_engine.pytorch.fp8.extra_state import OptionalExtraState
from transformer_engine.pytorch.module.arguments import (
    check_numbers,
    check_sizes,
    in_layer,
    refuse_keywords,
)
from transformer_engine.pytorch.module.inputs import check_device, check_features, refuse_dtype
from transformer_engine.pytorch.module.names import check_name
from transformer_engine.pytorch.module.parameters import (
    HasParameters,
    ParameterSet,
    ParameterSpec,
    names_in,
    params_dtype_of,
    tensors_of,
)
from transformer_engine.pytorch.module.settings import HasSettings, flag_setting, setting
from transformer_engine.pytorch.module.single_stage import SingleStageModule
from transformer_engine.pytorch.parallel.gradients import with_summed_gradients
from transformer_engine.pytorch.parallel.groups import TensorParallel


def norm_parameters(
    kind: str,
    shape: tuple[int, ...],
    zero_centered: bool,
    sequence_parallel: bool | None,
    prefix: str = "",
) -> list[ParameterSpec]:
    """Gamma (and beta for LayerNorm), as `<prefix>weight` and `<prefix>bias`."""
    attributes = {} if sequence_parallel is None else {"sequence_parallel": sequence_parallel}
    start = nn.init.zeros_ if zero_centered else nn.init.ones_
    specs = [ParameterSpec(f"{prefix}weight", shape, start, attributes)]
    if kind == "LayerNorm":
        specs.append(ParameterSpec(f"{prefix}bias", shape, nn.init.zeros_, attributes))
    return specs


def check_normalization(kind: str, module: str) -> str:
    """Return the kind of norm; raise ValueError unless it is supported."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise ValueError(
            f"[{module}] Unsupported normalization type {kind!r}: expected 'LayerNorm' or 'RMSNorm'"
        )
    return kind


def checked_eps(module: Any, eps: float) -> float:
    """Return a setting `eps`; raise TypeError unless it is a number, ValueError below 0."""
    kind, layer = type(module).__name__, getattr(module, "name", None)
    check_numbers(kind, layer, eps=eps)
    if not eps >= 0.0:  # as for NaN
        raise ValueError(f"[{kind}] expected eps of 0 or more, got {eps}{in_layer(layer)}")
    return eps


class Normalizes(HasSettings):
    """Base of modules with a norm.

    Attributes:
        eps: added to the variance.
        zero_centered_gamma: multiply by `1 + gamma`.
    """

    eps: float = setting(checked_eps)
    zero_centered_gamma: bool = flag_setting()


class NormalizesFirst(Normalizes):
    """Base of modules with GEMMs behind a norm.

    Attributes:
        return_layernorm_output: also return the output of the norm.
        return_layernorm_output_gathered: return the norm's output for the tokens of all ranks.
    """

    normalization: str
    sequence_parallel: bool
    _returns_input: bool

    return_layernorm_output: bool = flag_setting()
    return_layernorm_output_gathered: bool = flag_setting()

    def fixed_settings(self) -> tuple[str, ...]:
        """See `HasSettings`. With `return_input`, outer layers rely on the number of results."""
        results = ("return_bias", "return_layernorm_output") if self._returns_input else ()
        return (*super().fixed_settings(), "normalization", *results)

    def _norm_stage(self, mode: str | None) -> tuple[Norm, bool]:
        """The norm, and whether the chain returns the norm's output after gathering it."""
        returned = self.return_layernorm_output
        gathers = returned and self.return_layernorm_output_gathered
        gathers = gathers and mode == "column" and self.sequence_parallel
        tap = tap_of(returned and not gathers, self._returns_input)
        return Norm(self.normalization, self.eps, self.zero_centered_gamma, tap), gathers


class NormModule(Normalizes, HasParameters, OptionalExtraState, SingleStageModule):
    """A norm with parameters. Subclasses say which kind.

    Attributes:
        ranks_with_other_heads: tensor parallel ranks that normalise other heads with the same
            parameters, whose gradients are summed over these ranks; None if there are none.
    """

    kind: str
    ranks_with_other_heads: TensorParallel | None = None

    def __init__(
        self,
        hidden_size: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        normalized_shape: int | Sequence[int] | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        _check_others(type(self), others)
        check_name(name, type(self).__name__)
        super().__init__()
        self.name = name or type(self).__name__
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.chain = self._build_chain()
        shape = _shape_of(hidden_size, normalized_shape, type(self).__name__)
        for size in shape:
            check_sizes(self.kind, self.name, hidden_size=size)
        self.normalized_shape, self.hidden_size = shape, math.prod(shape)
        self._parameter_set = ParameterSet(None)
        specs = norm_parameters(self.kind, shape, zero_centered_gamma, sequence_parallel)
        self._names = names_in(specs, "weight", "bias")
        self._parameter_set.create(self, specs, params_dtype_of(params_dtype, dtype), device)

    def _build_chain(self) -> Chain:
        return Chain.of(Norm(self.kind, self.eps, self.zero_centered_gamma))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Normalise over the last axis, or the axes of `normalized_shape`; statistics in fp32.

        Args:
            inp: `(..., *normalized_shape)`, fp32, fp16 or bf16.

        Returns:
            A tensor of the shape of `inp`, in the dtype of the weight (of `torch.autocast` where
            that is active).

        Raises:
            ValueError: other last sizes; an input on another device.
            TypeError: not a tensor, or another dtype.
        """
        shape = self.normalized_shape
        check_features(self, inp, shape[-1])
        if inp.dtype not in HIGH_PRECISION:
            refuse_dtype(self.kind, "inp", inp.dtype, self.name)
        if len(shape) == 1:
            return self.run(inp)
        if tuple(inp.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"[{self.kind}] expected inp of shape (..., {', '.join(map(str, shape))}), got"
                f" {tuple(inp.shape)} (layer {self.name})"
            )
        return self.run(inp.flatten(-len(shape))).view(inp.shape)

    def dtype_and_parameters(
        self, like: torch.Tensor
    ) -> tuple[torch.dtype, Sequence[torch.Tensor | None]]:
        """See `SingleStageModule`."""
        weight, bias = tensors_of(self, self._names)
        assert weight is not None
        if weight.device != like.device:
            check_device(self, like, (weight,))
        parameters: Sequence[torch.Tensor | None] = (weight, bias)
        if weight.dim() > 1:
            parameters = [p if p is None else p.flatten() for p in parameters]
        if self.ranks_with_other_heads is not None:
            parameters = with_summed_gradients(parameters, self.ranks_with_other_heads)
        return autocast_dtype(like) or weight.dtype, parameters

    def extra_repr(self) -> str:
        """Size and settings."""
        size = self.hidden_size if len(self.normalized_shape) == 1 else self.normalized_shape
        return f"{size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _check_others(kind: type[NormModule], others: dict[str, Any]) -> None:
    """Accept keywords of torch's norms with their default, and `sm_margin`, which has no effect."""
    for name in ("bias", "elementwise_affine"):
        if not others.pop(name, True):
            raise NotImplementedError(
                f"[{kind.__name__}] {name}=False is not implemented: take torch.nn.{kind.__name__}"
            )
    others.pop("sm_margin", None)
    if others:
        refuse_keywords(kind, others)


def _shape_of(
    hidden_size: int | Sequence[int] | None,
    normalized_shape: int | Sequence[int] | None,
    module: str,
) -> tuple[int, ...]:
    if (hidden_size is None) == (normalized_shape is None):
        raise ValueError(
            f"[{module}] expected one of hidden_size and normalized_shape, got "
            f"{hidden_size} and {normalized_shape}"
        )
    shape: Any = hidden_size if hidden_size is not None else normalized_shape
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        return (shape,)  # type: ignore[return-value]
    if not shape:
        raise ValueError(f"[{module}] expected at least one size, got {shape}")
    return tuple(shape)
