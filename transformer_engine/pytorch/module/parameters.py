"""Parameters of modules: names, initialisation, and weights split into several parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from transformer_engine.pytorch._torch_private import default_device_is_set
from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.export.onnx import plain_weight
from transformer_engine.pytorch.fp8 import weights as fp8_weights
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.fp8.model_init import model_init
from transformer_engine.pytorch.module.arguments import check_sizes, in_layer
from transformer_engine.pytorch.parallel.shards import Shard
from transformer_engine.pytorch.rng import CudaRNGStatesTracker, check_tracker, tracker_from
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.attributes import attributes_beside
from transformer_engine.pytorch.tensor.shards import piece_of

if TYPE_CHECKING:
    from transformer_engine.pytorch.module.parallel_mode import SharedLinear

InitMethod = Callable[[torch.Tensor], Any]
Split = Sequence[str] | Sequence[int] | Mapping[str, int] | None


def default_init_method(weight: torch.Tensor) -> None:
    """Normal with mean 0 and standard deviation 0.023, in place."""
    nn.init.normal_(weight, mean=0.0, std=0.023)


def default_device(device: torch.device | str | None) -> torch.device:
    """The device; for None that of an active `torch.device` context, else cuda if any, else cpu."""
    if device is not None:
        return torch.device(device)
    if default_device_is_set() or not torch.cuda.is_available():
        return torch.get_default_device()
    return torch.device("cuda", torch.cuda.current_device())


def device_of(op: str, layer: str | None, device: Any) -> torch.device:
    """`default_device`, whose error names the layer."""
    try:
        return default_device(device)
    except (RuntimeError, TypeError) as error:
        refused = TypeError if isinstance(error, TypeError) else ValueError
        raise refused(
            f"[{op}] expected device to be a torch.device or a name such as 'cuda' or 'cpu', got"
            f" {device!r}{in_layer(layer)}"
        ) from error


def params_dtype_of(params_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype:
    """`params_dtype`, or its torch spelling `dtype`, or torch's default dtype."""
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(
            f"[parameters] expected one of params_dtype and dtype, got {params_dtype} and {dtype}"
        )
    return params_dtype or dtype or torch.get_default_dtype()


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its name, shape, initial value, and attributes that trainers read."""

    name: str
    shape: tuple[int, ...]
    init: InitMethod
    attributes: dict[str, Any] = field(default_factory=dict)
    tracked: bool = False  # initialised under the RNG state tracker
    gemm_weight: bool = False  # may be kept in FP8, see quantized_model_init
    shard: Shard | None = None  # of a whole parameter


class ParameterSet:
    """The parameters of one module, created in order and (re)initialised together.

    It holds no reference to the module: in a reference cycle, a dropped module would keep its
    memory until the garbage collector runs.
    """

    def __init__(self, get_rng_state_tracker: Callable[[], Any] | None) -> None:
        self._tracker = get_rng_state_tracker
        self._specs: list[ParameterSpec] = []
        self.init = model_init()  # settings of the quantized_model_init that is active now

    def create(
        self,
        module: nn.Module,
        specs: Sequence[ParameterSpec],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        """Register a module's parameters in order and, unless they are on meta, initialise them."""
        check_tracker(type(module).__name__, self._tracker, getattr(module, "name", ""))
        on = device_of(type(module).__name__, getattr(module, "name", ""), device)
        for spec in specs:
            _check(module, spec, dtype)
            if spec.name in module._parameters:
                raise ValueError(
                    f"[{type(module).__name__}] expected parameters of different names, got two "
                    f"called {spec.name!r} (layer {module.name})"
                )
            self._specs.append(spec)
            self._register(module, spec, _empty(spec.shape, dtype, on))

    def _register(self, module: nn.Module, spec: ParameterSpec, data: torch.Tensor) -> None:
        parameter = _registered(module, spec, nn.Parameter(data))
        if not parameter.is_meta:
            self._initialise(spec, parameter)
        if self.init.enabled and spec.gemm_weight:
            label = f"{spec.name} of layer {module.name}"
            fp8_parameter = fp8_weights.make_parameter(parameter.detach(), self.init, label)
            module._parameters[spec.name] = _with_attributes(fp8_parameter, spec)

    def _initialise(self, spec: ParameterSpec, parameter: torch.Tensor) -> None:
        tracker = tracker_from(spec.name, self._tracker, "fork") if spec.tracked else None
        with torch.no_grad(), nullcontext() if tracker is None else tracker.fork():
            rank = None if spec.shard is None else spec.shard.ranks.rank
            if spec.shard is None or rank is None or not _draws_whole(tracker):
                spec.init(parameter)
                return
            whole = parameter.new_empty(spec.shard.whole_shape(parameter.shape))
            spec.init(whole)
            parameter.copy_(spec.shard.of(whole, rank))

    def spec(self, name: str) -> ParameterSpec | None:
        """The `ParameterSpec` of this name, or None."""
        return next((spec for spec in self._specs if spec.name == name), None)

    def adopt(self, module: nn.Module, name: str, data: torch.Tensor, trained: bool) -> None:
        """Register values as the parameter of this name, with the attributes of its spec."""
        parameter = nn.Parameter(data, trained)
        spec = self.spec(name)
        if spec is None:
            module.register_parameter(name, parameter)
        else:
            _registered(module, spec, parameter)

    def mark(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of the parameters whose specs have it."""
        for spec in self._specs:
            if name in spec.attributes:
                spec.attributes[name] = value
                setattr(module._parameters[spec.name], name, value)

    def start_as(self, inits: Mapping[str, InitMethod]) -> None:
        """Replace the initialisation of parameters, by name, from the next `reset` on."""
        self._specs = [replace(spec, init=inits.get(spec.name, spec.init)) for spec in self._specs]

    def reset(self, module: nn.Module) -> None:
        """Initialise every parameter again; parameters on meta get memory first."""
        for spec in self._specs:
            parameter = getattr(module, spec.name)
            if hasattr(parameter, "device_mesh"):
                self._reset_piece(module, spec, parameter)
            elif parameter.is_meta:
                device = default_device(None)
                if device.type == "meta":
                    device = default_device("cuda" if torch.cuda.is_available() else "cpu")
                self._register(module, spec, torch.empty_like(parameter, device=device))
                _carry_over(parameter, module._parameters[spec.name])
            elif isinstance(parameter, QuantizedTensor):
                values = _with_attributes(nn.Parameter(torch.empty_like(parameter)), spec)
                self._initialise(spec, values)
                fp8_weights.initialize(parameter, values, self.init)
            else:
                self._initialise(spec, parameter)

    def _reset_piece(self, module: nn.Module, spec: ParameterSpec, parameter: Any) -> None:
        """`reset` for a parameter that `fully_shard` has cut."""
        if parameter.is_meta:
            device = parameter.device_mesh.device_type
            made = _registered(module, spec, fp8_weights.materialised(parameter, device))
            parameter = _carry_over(parameter, made)
        piece = piece_of(parameter)
        if piece is None:
            self._initialise(spec, parameter)
            return
        values: Any = _with_attributes(nn.Parameter(torch.empty_like(parameter)), spec)
        self._initialise(spec, values)
        fp8_weights.initialize(piece, values.detach().to_local(), self.init)


def _draws_whole(tracker: Any) -> bool:
    """Whether each rank draws the whole parameter and takes its shard.

    With equal seeds, ranks then have the shards of the parameter that one process would draw.
    Trackers of trainers have a different seed on each rank: there each rank draws its shard.
    """
    return tracker is None or type(tracker) is CudaRNGStatesTracker


def _check(module: nn.Module, spec: ParameterSpec, dtype: torch.dtype) -> None:
    kind = type(module).__name__
    if not callable(spec.init):
        raise TypeError(
            f"[{kind}] expected a function that initialises {spec.name}, got {spec.init!r} "
            f"(layer {module.name})"
        )
    if dtype not in HIGH_PRECISION:
        raise TypeError(
            f"[{kind}] expected params_dtype float32, float16 or bfloat16 (fp8_model_init makes"
            f" FP8 weights), got {dtype}"
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (AssertionError, RuntimeError) as error:
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"[parameters] expected a device of this machine, got {device}, and torch sees no "
                "GPU; without device= parameters lie on the CPU here (python -m "
                "transformer_engine.doctor says what is missing)"
            ) from error
        raise


def _registered(module: nn.Module, spec: ParameterSpec, parameter: Any) -> Any:
    """Register a parameter; return what the module then has, with the attributes of the spec.

    `accelerate.init_empty_weights` replaces it by another one, on meta, without attributes.
    """
    module.register_parameter(spec.name, parameter)
    return _with_attributes(module._parameters[spec.name], spec)


def _with_attributes(parameter: Any, spec: ParameterSpec) -> Any:
    for key, value in spec.attributes.items():
        setattr(parameter, key, value)
    return parameter


def _carry_over(parameter: torch.Tensor, other: Any) -> Any:
    """Copy `requires_grad` and attributes that users have set from `parameter` to `other`."""
    vars(other).update(attributes_beside(parameter, other))
    return other.requires_grad_(parameter.requires_grad)


def sections_of(split: Split) -> Sequence[int]:
    """Sizes of sections, each of which ranks divide; () where `split` gives names of parameters."""
    if isinstance(split, list) and all(isinstance(size, int) for size in split):
        return split
    return ()


def split_sizes(split: Split, features: int, layer: str) -> dict[str, int]:
    """Sizes along dim 0 by name, without trailing underscores of the names; `{}` for no split."""
    if split is None or sections_of(split):
        return {}
    names = _part_names(split, layer)
    if isinstance(split, Mapping):
        sizes = dict(zip(names, split.values(), strict=True))
        check_sizes(layer, None, 0, **sizes)
        if sum(sizes.values()) != features:
            raise ValueError(
                f"[{layer}] expected the sizes of parameters_split to add up to out_features="
                f"{features}, got {dict(split)} (sum {sum(sizes.values())})"
            )
        return sizes
    if not names or features % len(names):
        raise ValueError(
            f"[{layer}] expected out_features={features} to be divisible among parameters_split, "
            f"got {list(split)}"
        )
    return dict.fromkeys(names, features // len(names))


def _part_names(split: Any, layer: str) -> list[str]:
    """The names of the parts, without trailing underscores.

    Raises:
        TypeError: neither names nor a mapping of names.
        ValueError: names that are equal, or that no parameter may have.
    """
    several = isinstance(split, Sequence | Mapping) and not isinstance(split, str | bytes)
    if not (several and all(isinstance(name, str) for name in split)):
        raise TypeError(
            f"[{layer}] expected parameters_split to be names, or a mapping of names to sizes, got"
            f" {split!r}"
        )
    names = [name.rstrip("_") for name in split]
    if len(set(names)) < len(names) or any(not name or "." in name for name in names):
        raise ValueError(
            f"[{layer}] expected names in parameters_split that differ in more than trailing"
            f" underscores, are not empty and have no dot, got {list(split)}"
        )
    return names


def matrices_of(module: nn.Module, own: ParameterSet) -> list[torch.Tensor]:
    """The weights of a module; behind each shard also a meta tensor of the shape of the whole."""
    found: list[torch.Tensor] = []
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.ndim != 2:
            continue
        spec = own.spec(name)
        found.append(parameter)
        if spec is not None and spec.shard is not None:
            found.append(torch.empty(spec.shard.whole_shape(parameter.shape), device="meta"))
    return found


Names = tuple[str | None, ...]


def names_in(specs: Sequence[ParameterSpec], *names: str) -> Names:
    """These names, with None in place of those that are not among the specs."""
    there = {spec.name for spec in specs}
    return tuple([name if name in there else None for name in names])


def tensors_of(module: nn.Module, names: Names) -> list[torch.Tensor | None]:
    """The parameters of a module, with None for each None.

    Tensors that torch.nn.utils.parametrize computes instead are found as attributes only.
    """
    own = module._parameters
    try:
        return [own[name] if name is not None else None for name in names]
    except KeyError:
        computed = [getattr(module, name) if name is not None else None for name in names]
        return [x if x is None else x.resolve_neg() for x in computed]


class HasParameters:
    """A module whose parameters a `ParameterSet` has made."""

    _parameter_set: ParameterSet

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise anew; parameters on meta get memory first. With `defer_init` do nothing."""
        if not defer_init:
            self._parameter_set.reset(self)  # type: ignore[arg-type]


class SplitLinearParameters:
    """Weight and bias of a Linear, as one parameter each or as several along dim 0.

    Names: `weight` and `bias`, or `<part>_weight` and `<part>_bias`; all weights first.
    """

    def __init__(
        self, sizes: dict[str, int], shared: SharedLinear, features: int, bias: bool
    ) -> None:
        self.shared = shared
        what = "{} of parameters_split" if sizes else "out_features"
        whole = sizes or {"": features}
        self.sizes = {name: shared.outputs(what.format(name), n) for name, n in whole.items()}
        self.weight_names = [_suffixed(part, "weight") for part in self.sizes]
        self.bias_names = [_suffixed(part, "bias") for part in self.sizes] if bias else []
        self._names: Names = (*self.weight_names, *(self.bias_names or (None,)))

    def specs(self, in_features: int, init: InitMethod) -> list[ParameterSpec]:
        """The parameters to create, in order."""
        sizes = self.sizes.values()
        weights = [
            self.shared.weight(name, (size, in_features), init)
            for name, size in zip(self.weight_names, sizes, strict=True)
        ]
        biases = [
            self.shared.bias(name, size) for name, size in zip(self.bias_names, sizes, strict=False)
        ]
        return weights + biases

    def of(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The whole weight `[out, in]` and the whole bias `[out]` (or None)."""
        tensors: Any = tensors_of(module, self._names)
        count = len(self.weight_names)
        if count == 1:
            weight, bias = tensors
            return weight, bias
        weights = tensors[:count]
        if exporting():
            weights = [plain_weight(weight, module.name) for weight in weights]
        return _joined(weights), _joined(tensors[count:]) if self.bias_names else None


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the parts along dim 0; `requires_grad` is kept where autograd is off.

    The first forward of a checkpoint runs so, and needs the flag to prepare for the backward.
    """
    whole = torch.cat([*parts])
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        whole.requires_grad_(any([part.requires_grad for part in parts]))
    return whole


def _suffixed(part: str, kind: str) -> str:
    return f"{part}_{kind}" if part else kind
