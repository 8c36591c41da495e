"""Recipes: immutable descriptions of how tensors are cast to FP8.

A recipe says which formats are used and how scales are computed; it holds no state. Two recipes
with equal fields are equal and share scaling state. Unknown keywords are accepted with a warning,
because scripts written for other versions pass them; misspelt ones are errors.
"""

from __future__ import annotations

import numbers
import operator
import sys
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from transformer_engine import _absent, _env
from transformer_engine._flags import is_flag
from transformer_engine.common._tolerant import tolerant
from transformer_engine.common.roles import Answers, QuantizerRole, named

_GEMM_KINDS = 3
_OVERRIDES = (None, "high_precision", "dequantized")
_LARGEST_MARGIN = 126  # 2^margin and its inverse are normal floats
_LARGEST_EPSILON = torch.finfo(torch.float32).max


class _FormatRange(NamedTuple):
    """Largest finite values of forward and backward tensors."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 formats: E4M3 everywhere, E5M2 everywhere, or E4M3 forward and E5M2 for gradients."""

    E4M3 = _FormatRange(448.0, 448.0)
    E5M2 = _FormatRange(57344.0, 57344.0)
    HYBRID = _FormatRange(448.0, 57344.0)


@dataclass(frozen=True)
class _Checked:
    """Base of classes that scripts construct: checks values against the types of fields."""

    _typed: ClassVar[list[tuple[str, type, str]]] = []  # fields, types, and what is expected

    def __post_init__(self) -> None:
        for name, kind, expected in self._typed:
            value = getattr(self, name)
            if not isinstance(value, kind):
                self._convert(name, kind, value, expected)

    def _convert(self, name: str, kind: type, value: Any, expected: str) -> None:
        """Store anything that counts as a flag as a bool, and numbers of any library as floats."""
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        fits = is_flag(value) if kind is bool else kind is float and number
        self._expect(name, fits, expected)
        try:
            object.__setattr__(self, name, kind(value))
        except OverflowError:
            self._expect(name, False, f"{expected} in the range of floats")

    def _take_int(self, name: str, allowed: range, expected: str) -> None:
        """Check a number of any library, and store it as an int."""
        value = getattr(self, name)
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        self._expect(name, number is not None and number in allowed, expected)
        object.__setattr__(self, name, number)

    def _expect(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            value = attrgetter(name)(self)
            raise ValueError(
                f"[{type(self).__name__}] expected {name} to be {expected}, got {value!r}"
            )


@dataclass(frozen=True)
class MMParams(_Checked):
    """How a GEMM accumulates: `use_split_accumulator=True` regularly adds up in fp32."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams(_Checked):
    """How one kind of tensor is quantised under current scaling."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0.0 <= self.amax_epsilon <= _LARGEST_EPSILON
        self._expect("amax_epsilon", fits, "a finite number >= 0")
        object.__setattr__(self, "_epsilon", repr(self.amax_epsilon))

    def epsilon(self) -> float:
        """`amax_epsilon`, as a constant in compiled code, where floats may become graph inputs."""
        if not torch.compiler.is_compiling():
            return self.amax_epsilon
        return float(vars(self)["_epsilon"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields from a pickle, and check them."""
        vars(self).update(state)
        self.__post_init__()


@dataclass(frozen=True)
class Recipe(_Checked):
    """Base of all recipes; the predicates tell the families apart."""

    def delayed(self) -> bool:
        """Whether scales come from a history of amaxes."""
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Whether the scale comes from the amax of the tensor itself."""
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        """Whether a tensor has one scale."""
        return self.delayed() or self.float8_current_scaling()

    def float8_block_scaling(self) -> bool:
        """Whether each block of a tensor has its own scale."""
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        """Whether scales are E8M0 per 32 elements."""
        return False

    def nvfp4(self) -> bool:
        """Whether elements have four bits."""
        return False

    def custom(self) -> bool:
        """Whether users supply the quantizers."""
        return isinstance(self, CustomRecipe)


@tolerant
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales from the amaxes of past steps.

    Args:
        margin: scales are divided by `2 ** margin`.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        amax_history_len: number of steps that the history holds.
        amax_compute_algo: `"max"`, `"most_recent"`, or a callable `amax_history -> amax`. It gets
            `[length, n]`, whose row 0 belongs to the step that ends, and returns `[n]`.
        scaling_factor_compute_algo: callable `(amax, scale, fp8_max, recipe) -> scale`, or None.
            Its results for modules that did not run are ignored.
        reduce_amax: take the maximum over the ranks of `fp8_group`.
        fp8_dpa: run attention in FP8.
        fp8_mha: like `fp8_dpa`; projections and attention still exchange high-precision tensors.
        interval: accepted for old scripts; scales are updated every step.
        override_linear_precision: `(fprop, dgrad, wgrad)`; has no effect, and warns if any is True.
        backward_override: None; other recipes have further values.

    Raises:
        ValueError: a value other than these.

    >>> DelayedScaling(amax_history_len=16).margin
    0
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("backward_override", self.backward_override is None, "None")
        format, algorithm = self.fp8_format, self.amax_compute_algo
        margins = range(-_LARGEST_MARGIN, _LARGEST_MARGIN + 1)
        self._take_int("margin", margins, f"an int within +-{_LARGEST_MARGIN}")
        self._expect("interval", isinstance(self.interval, int | None), "an int")
        self._expect("fp8_format", isinstance(format, Format), "a Format, such as Format.HYBRID")
        trains = "Format.HYBRID or Format.E4M3 (E5M2 forward tensors do not train)"
        self._expect("fp8_format", format is not Format.E5M2, trains)
        self._take_int("amax_history_len", range(1, sys.maxsize), "an int >= 1")
        known = callable(algorithm) or algorithm in ("max", "most_recent")
        self._expect("amax_compute_algo", known, "'max', 'most_recent' or a callable")
        find_scale = self.scaling_factor_compute_algo
        known = find_scale is None or callable(find_scale)
        self._expect("scaling_factor_compute_algo", known, "a callable or None")
        flags = self.override_linear_precision
        three = isinstance(flags, tuple | list) and len(flags) == _GEMM_KINDS
        three = three and all([is_flag(flag) for flag in flags])
        self._expect("override_linear_precision", three, "three flags, (fprop, dgrad, wgrad)")
        object.__setattr__(self, "override_linear_precision", tuple([bool(f) for f in flags]))
        if any(flags):
            warnings.warn(
                "DelayedScaling: override_linear_precision is accepted but has no effect; the "
                "debugger's DisableFP8GEMM runs chosen GEMMs in high precision",
                stacklevel=4,
            )


@tolerant
@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Scales from the amax of the tensor itself: `fp8_max / max |x|`.

    Args:
        use_power_2_scales: round every scale down to a power of two; the default is the value of
            the variable NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES, and False if it is not set.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        fp8_quant_fwd_inp: how activations are quantised.
        fp8_quant_fwd_weight: how weights are quantised.
        fp8_quant_bwd_grad: how gradients are quantised.
        fp8_gemm_fprop: accumulation of the forward GEMM.
        fp8_gemm_dgrad: accumulation of the data-gradient GEMM.
        fp8_gemm_wgrad: accumulation of the weight-gradient GEMM.
        fp8_dpa: run attention in FP8; not implemented for this recipe, attention refuses it.
        fp8_mha: like `fp8_dpa`.
        backward_override: "high_precision" runs dgrad and wgrad in the dtype of activations, from
            the operands before their cast; "dequantized" does so from the values of the codes that
            the forward has read. Gradients are not cast. None: all GEMMs run in FP8. The default is
            the value of the variable NVTE_BACKWARD_OVERRIDE, and None if it is not set. A weight
            that exists only in FP8 is dequantised in both cases. All modules with GEMMs take it,
            `LayerNormMLP` included.

    Raises:
        ValueError: a value other than these.

    >>> Float8CurrentScaling().fp8_format
    <Format.HYBRID: _FormatRange(max_fwd=448.0, max_bwd=57344.0)>
    """

    use_power_2_scales: bool = field(default_factory=_env.current_scaling_power_2_scales)
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = field(default_factory=QParams)
    fp8_quant_fwd_weight: QParams = field(default_factory=QParams)
    fp8_quant_bwd_grad: QParams = field(default_factory=QParams)
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(False))
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=_env.backward_override)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.backward_override in _OVERRIDES
        self._expect("backward_override", known, "None, 'high_precision' or 'dequantized'")
        known = self.fp8_format in (Format.HYBRID, Format.E4M3)
        self._expect("fp8_format", known, "Format.HYBRID or Format.E4M3")


def _block_rule() -> QParams:
    return QParams(power_2_scale=True)


@tolerant
@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A scale for every block of a tensor: `fp8_max / max |x|` over the block.

    Blocks are 1 x 128 values along the axis that a GEMM sums over (dimension 1), or 128 x 128
    values (dimension 2). In every GEMM, at least one operand must have blocks of dimension 1.

    Args:
        use_f32_scales: allow scales that are not powers of two; the default is the value of the
            variable NVTE_FP8_BLOCK_SCALING_FP32_SCALES, and False if it is not set.
        fp8_format: `Format.E4M3`.
        fp8_quant_fwd_inp: how activations are quantised; scales are powers of two if
            `power_2_scale` is True here and `use_f32_scales` is False.
        fp8_quant_fwd_weight: how weights are quantised.
        fp8_quant_bwd_grad: how gradients are quantised.
        x_block_scaling_dim: dimension of the blocks of activations, 1 or 2.
        w_block_scaling_dim: dimension of the blocks of weights.
        grad_block_scaling_dim: dimension of the blocks of gradients.
        fp8_gemm_fprop: accumulation of the forward GEMM, which must be split.
        fp8_gemm_dgrad: accumulation of the data-gradient GEMM, which must be split.
        fp8_gemm_wgrad: accumulation of the weight-gradient GEMM, which must be split.
        fp8_dpa: False; attention runs in high precision.
        fp8_mha: False.
        backward_override: as for `Float8CurrentScaling`.

    Raises:
        ValueError: a value other than these.

    >>> Float8BlockScaling().w_block_scaling_dim
    2
    """

    use_f32_scales: bool = field(default_factory=_env.block_scaling_fp32_scales)
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = field(default_factory=_block_rule)
    fp8_quant_fwd_weight: QParams = field(default_factory=_block_rule)
    fp8_quant_bwd_grad: QParams = field(default_factory=_block_rule)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default_factory=MMParams)
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=_env.backward_override)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.backward_override in _OVERRIDES
        self._expect("backward_override", known, "None, 'high_precision' or 'dequantized'")
        self._expect("fp8_format", self.fp8_format is Format.E4M3, "Format.E4M3")
        wide = []
        for kind in ("x", "w", "grad"):
            name = f"{kind}_block_scaling_dim"
            self._take_int(name, range(1, 3), "1 or 2")
            wide += [name] if getattr(self, name) == 2 else []
        if len(wide) > 1:
            raise ValueError(
                f"[Float8BlockScaling] expected {' and '.join(wide)} to be 2 for one kind of tensor"
                " at most (no GEMM multiplies two operands in 2D blocks), got 2"
            )
        for gemm in ("fprop", "dgrad", "wgrad"):
            split = getattr(self, f"fp8_gemm_{gemm}").use_split_accumulator
            self._expect(f"fp8_gemm_{gemm}.use_split_accumulator", split, "True")
        self._expect("fp8_dpa", not self.fp8_dpa, "False")
        self._expect("fp8_mha", not self.fp8_mha, "False")


@tolerant
@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Quantizers that your function chooses for each tensor; equal functions make equal recipes.

    Args:
        qfactory: called once with each `QuantizerRole`; returns a quantizer without scaling state,
            or None to leave the tensor in high precision.
        fp8_dpa: run attention in FP8; not implemented for this recipe, attention refuses it.
        fp8_mha: like `fp8_dpa`.
        quantization_alignment: the result of `get_align_size_for_quantization`.

    Raises:
        ValueError: a value other than these.

    >>> CustomRecipe(lambda role: None).custom()
    True
    """

    qfactory: Callable[[QuantizerRole], Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = callable(self.qfactory) and isinstance(self.qfactory, Hashable)
        self._expect("qfactory", fits, "a hashable callable")
        self._take_int("quantization_alignment", range(1, sys.maxsize), "an int >= 1")
        if not torch.compiler.is_compiling():  # `CustomRules` refuses a recipe made there
            object.__setattr__(self, "answers", Answers(self.qfactory))

    def __repr__(self) -> str:
        """With an address of the function, because reprs serve as keys."""
        more = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self)[1:]]
        return f"{type(self).__name__}(qfactory={named(self.qfactory)}, {', '.join(more)})"

    def __reduce__(self) -> Any:
        """Copies have answers of their own."""
        return type(self), tuple(getattr(self, one.name) for one in fields(self))


# For each annotation of a field: the type of values, and how messages name it.
_TYPES: dict[str, tuple[type, str]] = {
    "bool": (bool, "True or False"),
    "float": (float, "a number"),
    "MMParams": (MMParams, "an MMParams, such as MMParams()"),
    "QParams": (QParams, "a QParams, such as QParams()"),
}
for _kind in list[Any]((MMParams, QParams, *Recipe.__subclasses__())):
    _kind._typed = [(f.name, *_TYPES[str(f.type)]) for f in fields(_kind) if f.type in _TYPES]


def __getattr__(name: str) -> NoReturn:
    _absent.refuse(__name__, name)
