"""Checks of the inputs of modules and functions, whose errors name the layer and the argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.module.arguments import in_layer
from transformer_engine.pytorch.parallel.dtensors import is_dtensor
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

# Found once: this is on the hot path.
_is_compiling = torch.compiler.is_compiling
_Tensor, _strided = torch.Tensor, torch.strided

# The leading sizes of a tensor, by format.
LEADING = {"sbhd": "sequence, batch", "bshd": "batch, sequence", "thd": "tokens"}
Parameters = Sequence[torch.Tensor | None]
Forward = TypeVar("Forward", bound=Callable[..., Any])
# Words in errors of torch and of kernels about tensors on different devices, which do not say which
# argument is meant.
_OTHER_DEVICE = ("same device", "expected device", "meta")


def refuse_input(module: str, parameter: str, value: object, layer: str | None) -> NoReturn:
    """Raise TypeError for an input that is not a plain, dense tensor."""
    wanted, got = "a torch.Tensor", type(value).__name__
    if is_dtensor(value):
        wanted, got = "a plain torch.Tensor", "a DTensor: call its to_local()"
    elif isinstance(value, torch.Tensor):
        wanted, got = "a dense torch.Tensor", f"one of layout {value.layout}"
    raise TypeError(f"[{module}] expected {parameter} to be {wanted}, got {got}{in_layer(layer)}")


def refuse_dtype(module: str, parameter: str, dtype: torch.dtype, layer: str | None) -> NoReturn:
    """Raise TypeError for an input that is not in high precision."""
    raise TypeError(
        f"[{module}] expected {parameter} of float32, float16 or bfloat16, got {dtype}"
        f"{in_layer(layer)}"
    )


def can_read(x: torch.Tensor) -> bool:
    """Whether the host can read elements at once: a plain CPU tensor, outside of compilation."""
    if type(x) is not _Tensor or x.device.type != "cpu":
        return False
    return not _is_compiling()


def known_lengths(cu_seqlens: torch.Tensor) -> list[int]:
    """The lengths of sequences; an empty list where the host cannot read them."""
    return cu_seqlens.diff().tolist() if can_read(cu_seqlens) else []


def check_rise(
    op: str, parameter: str, cu_seqlens: torch.Tensor, tokens: int | None = None
) -> None:
    """Check that sequences begin at 0, and end within the tokens; for CPU tensors only."""
    if not can_read(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    ordered = ends[:1] == [0] and ends == sorted(ends)
    if not ordered or (tokens is not None and ends[-1] > tokens):
        limit = "" if tokens is None else f" to at most {tokens} (the tokens)"
        raise ValueError(
            f"[{op}] expected {parameter} to rise from 0{limit}, got {shortened(ends)}"
        )


def check_cu_seqlens(
    op: str, parameter: str, cu_seqlens: torch.Tensor, *dtypes: torch.dtype
) -> None:
    """Raise unless this is a vector of one of these dtypes, with an element at least."""
    check_tensors(op, **{parameter: cu_seqlens})
    if cu_seqlens.dtype not in dtypes:
        names = " or ".join(map(str, dtypes))
        raise TypeError(f"[{op}] expected {parameter} of {names}, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"[{op}] expected {parameter} of shape (batch + 1,), got {tuple(cu_seqlens.shape)}"
        )


def shortened(values: list[int]) -> list[Any]:
    """The values for a message, with "..." in the middle if there are more than nine."""
    return values if len(values) <= 9 else [*values[:4], "...", *values[-4:]]


def check_tensors(op: str, layer: str | None = None, /, **values: object) -> None:
    """Raise TypeError unless every one of these arguments is a dense tensor."""
    for name, x in values.items():
        if not isinstance(x, _Tensor) or x.layout is not _strided:
            refuse_input(op, name, x, layer)


def check_floating(op: str, /, **values: torch.Tensor) -> None:
    """Raise TypeError unless every one of these arguments is a dense tensor of floating point."""
    check_tensors(op, **values)
    for name, x in values.items():
        if not x.is_floating_point():
            raise TypeError(f"[{op}] expected {name} of floating point, got {x.dtype}")


def check_integers(op: str, /, **values: torch.Tensor) -> None:
    """Raise TypeError unless every one of these arguments is a dense tensor of int32 or int64."""
    check_tensors(op, **values)
    for name, x in values.items():
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"[{op}] expected {name} of int32 or int64, got {x.dtype}")


def as_tensor(op: str, wanted: str, values: Any) -> torch.Tensor:
    """`torch.as_tensor(values)`; raise TypeError, with what is `wanted`, if torch refuses."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"[{op}] expected {wanted}, got {values!r}") from error


def check_plain(op: str, layer: str | None = None, /, **values: torch.Tensor) -> None:
    """Raise TypeError for a tensor in FP8."""
    for name, x in values.items():
        if isinstance(x, QuantizedTensor):
            raise TypeError(
                f"[{op}] expected {name} in high precision, got {type(x).__name__}, a tensor in "
                "FP8 (as te.ops.Quantize returns): pass its dequantize(), as te.ops.Sequential does"
                f" between operations{in_layer(layer)}"
            )


def check_hidden(
    module: nn.Module, parameter: str, x: torch.Tensor, features: int, format: str
) -> None:
    """Raise unless `x` has the shape of hidden states in a format such as `sbhd`."""
    if type(x) is not _Tensor or x.layout is not _strided:
        _check_input(module, parameter, x)
    shape = x.shape
    if not shape or shape[-1] != features or len(shape) != (2 if format == "thd" else 3):
        raise ValueError(
            f"[{type(module).__name__}] expected {parameter} of shape ({LEADING[format]},"
            f" {features}), got {tuple(shape)}"
        )
    if x.dtype not in HIGH_PRECISION:
        refuse_dtype(type(module).__name__, parameter, x.dtype, None)


def check_features(module: nn.Module, x: torch.Tensor, features: int) -> None:
    """Raise unless the input is a dense tensor whose last size is `features`."""
    if type(x) is not _Tensor or x.layout is not _strided:
        _check_input(module, "inp", x)
    shape = x.shape
    if not shape or shape[-1] != features:
        raise ValueError(
            f"[{type(module).__name__}] expected inp of shape (..., {features}), got"
            f" {tuple(shape)} (layer {module.name})"
        )


def _check_input(module: nn.Module, parameter: str, x: torch.Tensor) -> None:
    """Raise TypeError unless kernels can read the input; parameters are allowed."""
    check_plain(type(module).__name__, module.name, **{parameter: x})  # type: ignore[arg-type]
    if not isinstance(x, _Tensor) or x.layout is not _strided or is_dtensor(x):
        refuse_input(type(module).__name__, parameter, x, module.name)  # type: ignore[arg-type]


def check_device(module: nn.Module, x: torch.Tensor, parameters: Parameters) -> None:
    """Raise ValueError unless the input is on the device of every parameter."""
    for parameter in parameters:
        if parameter is not None and parameter.device != x.device:
            beside = _name_of(module, parameter), parameter.device
            op, layer = type(module).__name__, module.name
            _refuse_device(op, "inp", x.device, *beside, layer)  # type: ignore[arg-type]


def check_devices(op: str, layer: str | None = None, /, **values: object) -> None:
    """Raise ValueError unless all tensors among these arguments are on one device."""
    lists = [(name, x if isinstance(x, tuple | list) else (x,)) for name, x in values.items()]
    placed = [(name, x.device) for name, xs in lists for x in xs if isinstance(x, _Tensor)]
    for name, device in placed[1:]:
        if device != placed[0][1]:
            _refuse_device(op, name, device, *placed[0], layer)


def _refuse_device(
    op: str, name: str, got: torch.device, beside: str, expected: torch.device, layer: str | None
) -> NoReturn:
    raise ValueError(
        f"[{op}] expected {name} on {expected}, where {beside} is, got {got}{in_layer(layer)}"
    )


def checked_dtype(module: nn.Module, x: torch.Tensor, parameters: Parameters) -> torch.dtype:
    """The input's dtype; raise unless GEMMs take it and every parameter has it."""
    if x.dtype not in HIGH_PRECISION:
        refuse_dtype(type(module).__name__, "inp", x.dtype, module.name)  # type: ignore[arg-type]
    for parameter in parameters:
        if parameter is not None and parameter.dtype != x.dtype:
            raise TypeError(
                f"[{type(module).__name__}] Data types for parameters must match when outside "
                f"of torch.autocast: expected {x.dtype} (the dtype of inp), got "
                f"{parameter.dtype} for {_name_of(module, parameter)} (layer {module.name})"
            )
    return x.dtype


def _name_of(module: nn.Module, parameter: torch.Tensor) -> str:
    for name, own in module.named_parameters(recurse=False):
        if own is parameter:
            return name
    # A weight that is split is put together from several parameters, a bias from vectors.
    for name, own in module.named_parameters(recurse=False):
        if (own.dtype, own.device, own.ndim) == (parameter.dtype, parameter.device, parameter.ndim):
            return name
    return "a parameter"


def names_layer(forward: Forward) -> Forward:
    """Decorate a `forward`: errors name the layer, and an argument that is on another device."""

    @functools.wraps(forward)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            text = str(error)
            if any(words in text for words in _OTHER_DEVICE):
                parameters = [*inspect.signature(forward).parameters][1:]
                explicit = dict(zip(parameters, args, strict=False)) | kwargs
                check_devices(type(self).__name__, self.name, **explicit)
            if self.name and text.startswith("[") and "(layer " not in text:
                # The rest of a message of several lines is a table.
                first, newline, rest = text.partition("\n")
                colon = ":" if newline and first.endswith(":") else ""
                first = first.removesuffix(colon)
                error.args = (f"{first} (layer {self.name}){colon}{newline}{rest}",)
            raise

    return named  # type: ignore[return-value]


def explicit_arguments(
    *, checkpoint_core_attention: bool, core_attention_bias_type: str, **others: Any
) -> dict[str, Any]:
    """The arguments of attention that differ from their defaults.

    Each keyword costs half a microsecond on its way through `nn.Module.__call__`.
    """
    explicit = {name: x for name, x in others.items() if x is not None}
    if checkpoint_core_attention:
        explicit["checkpoint_core_attention"] = checkpoint_core_attention
    if core_attention_bias_type not in ("no_bias", None):
        explicit["core_attention_bias_type"] = core_attention_bias_type
    return explicit
