"""What `convert` may replace: why a layer must stay, and how its counterpart is made."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.fp8.recipe_quantizers import FEATURE_ALIGNMENT
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_DEVICES = ("cpu", "cuda", "meta")
_NAMES = {"weight", "bias"}
_FUSED_NAMES = {*_NAMES, "layer_norm_weight", "layer_norm_bias"}


@dataclass(frozen=True)
class Counterpart:
    """How layers of one class are replaced.

    Attributes:
        target: the class of the replacement.
        refusal: returns why a layer cannot be replaced; None if it can.
        build: makes the replacement on meta, under a name; the caller then sets its parameters.
    """

    target: type[nn.Module]
    refusal: Callable[[Any], str | None]
    build: Callable[[Any, str], nn.Module]


class NormInNext(nn.Identity):
    """Takes the place of a norm that was fused into the `LayerNormLinear` after it."""


def label(kind: type[nn.Module]) -> str:
    """`nn.Linear` or `te.Linear`."""
    ours = kind.__module__.partition(".")[0] == "transformer_engine"
    return f"{'te' if ours else 'nn'}.{kind.__name__}"


def holds_other_matrix(module: nn.Module) -> bool:
    """Whether a module of an unknown class has a matrix as `weight`, as a Linear would."""
    known = isinstance(module, (*TO_TE, nn.Embedding, nn.EmbeddingBag, torch.jit.ScriptModule))
    weight = None if known else module._parameters.get("weight")
    if weight is None or label(type(module)).startswith("te."):
        return False
    return not nn.parameter.is_lazy(weight) and weight.ndim == 2


def unlike_its_class(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Why a layer may behave differently from its class; None if it does not."""
    if parametrize.is_parametrized(module):
        return f"its {', '.join(module.parametrizations)} is parametrized"  # type: ignore[arg-type]
    if type(module) is not kind:
        return f"{type(module).__name__} is a subclass of {label(kind)}"
    if "forward" in vars(module):
        return "its forward was replaced"
    hooks = [name.lstrip("_") for name in _HOOKS if getattr(module, name, None)]
    if hooks:
        return f"it has {', '.join(hooks)}"
    if "weight" not in module._parameters:
        return "it has no parameter `weight`: it is split, computed or wrapped"
    names = _FUSED_NAMES if kind is LayerNormLinear else _NAMES
    more = [*module._buffers, *module._modules, *module._parameters.keys() - names]
    if more:
        return f"it holds more than its class does: {', '.join(sorted(more))}"
    return _parameters_unlike(module)


def _parameters_unlike(module: nn.Module) -> str | None:
    present = [p for p in module._parameters.values() if p is not None]
    for parameter in present:
        if type(parameter) is not nn.Parameter:
            return f"its parameters are of type {type(parameter).__name__}"
        if parameter.dtype not in HIGH_PRECISION:
            return f"dtype {parameter.dtype}: expected float32, float16 or bfloat16"
        if parameter.device.type not in _DEVICES:
            return f"device {parameter.device}: expected cuda or cpu"
    if len({(p.dtype, p.device) for p in present}) > 1:
        return "its parameters differ in dtype or device"
    return None


def _linear_refusal(module: nn.Linear) -> str | None:
    sizes = (module.in_features, module.out_features)
    if any(size == 0 or size % FEATURE_ALIGNMENT for size in sizes):
        return f"sizes {sizes[0]} -> {sizes[1]}: FP8 needs multiples of {FEATURE_ALIGNMENT}"
    weight = module._parameters["weight"]
    if weight is None or tuple(weight.shape) != sizes[::-1]:
        return f"its weight is not of shape {sizes[::-1]}"
    return None


def _norm_refusal(module: Any) -> str | None:
    if module._parameters["weight"] is None:
        return "it has no weight (elementwise_affine=False)"
    if "bias" in module._parameters and module._parameters["bias"] is None:
        return "it has no bias"
    if module.eps is None and module.weight.dtype != torch.float32:
        return f"eps=None depends on the version of torch for {module.weight.dtype}: give a number"
    return None


def epsilon_of(module: Any) -> float:
    """A norm's eps; for None, torch's default, the machine epsilon of fp32."""
    return torch.finfo(torch.float32).eps if module.eps is None else module.eps


def _start_as_torch(module: Any, in_features: int) -> None:
    """Make `reset_parameters` initialise as `nn.Linear` does."""
    bound = 1 / math.sqrt(in_features)
    module._parameter_set.start_as(
        {
            "weight": functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
            "bias": functools.partial(nn.init.uniform_, a=-bound, b=bound),
        }
    )


def _build_linear(module: nn.Linear, name: str) -> nn.Module:
    made = Linear(
        module.in_features, module.out_features, module.bias is not None, device="meta", name=name
    )
    _start_as_torch(made, module.in_features)
    return made


def build_norm_linear(norm: Any, linear: Any, name: str) -> nn.Module:
    """A `LayerNormLinear` on meta for a norm and the Linear after it."""
    made = LayerNormLinear(
        linear.in_features,
        linear.out_features,
        epsilon_of(norm),
        linear.bias is not None,
        normalization=type(norm).__name__,
        device="meta",
        name=name,
    )
    _start_as_torch(made, linear.in_features)
    return made


def _build_norm(module: Any, name: str) -> nn.Module:
    kind = LayerNorm if isinstance(module, nn.LayerNorm) else RMSNorm
    return kind(tuple(module.normalized_shape), epsilon_of(module), device="meta", name=name)


def _te_linear_refusal(module: Any) -> str | None:
    if module.tp_size > 1:
        return f"it is the part of one of {module.tp_size} tensor parallel ranks"
    if module.return_bias:
        return "return_bias=True has no counterpart"
    if any(getattr(stage, "fuse_wgrad", False) for stage in module.chain.stages):
        return "fuse_wgrad_accumulation=True has no counterpart"
    if isinstance(module, LayerNormLinear) and len(module.chain.outputs) > 1:
        return "it returns the output of its norm too"
    return _zero_centered(module)


def _zero_centered(module: Any) -> str | None:
    if getattr(module, "zero_centered_gamma", False):
        return "zero_centered_gamma=True has no counterpart"
    return None


def _torch_linear(module: Any, name: str) -> nn.Module:
    return nn.Linear(module.in_features, module.out_features, bias=module.use_bias, device="meta")


def _torch_norm(module: Any, name: str) -> nn.Module:
    kind = nn.LayerNorm if isinstance(module, LayerNorm) else nn.RMSNorm
    return kind(module.normalized_shape, eps=module.eps, device="meta")


def torch_norm_of(module: Any) -> nn.Module:
    """The norm of a `LayerNormLinear`, as torch's, on meta."""
    kind = nn.LayerNorm if module.normalization == "LayerNorm" else nn.RMSNorm
    return kind(module.in_features, eps=module.eps, device="meta")


TO_TE: dict[type[nn.Module], Counterpart] = {
    nn.Linear: Counterpart(Linear, _linear_refusal, _build_linear),
    nn.LayerNorm: Counterpart(LayerNorm, _norm_refusal, _build_norm),
    nn.RMSNorm: Counterpart(RMSNorm, _norm_refusal, _build_norm),
}
TO_TORCH: dict[type[nn.Module], Counterpart] = {
    Linear: Counterpart(nn.Linear, _te_linear_refusal, _torch_linear),
    LayerNorm: Counterpart(nn.LayerNorm, _zero_centered, _torch_norm),
    RMSNorm: Counterpart(nn.RMSNorm, _zero_centered, _torch_norm),
    LayerNormLinear: Counterpart(nn.Linear, _te_linear_refusal, _torch_linear),
}


@functools.cache
def own_attributes(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes that every object of a class has; users have set the others."""
    more = {"name": "sample"} if label(kind).startswith("te.") else {}
    sizes = (16, 16) if "Linear" in kind.__name__ else (16,)
    sample = kind(*sizes, device="meta", **more)
    return frozenset({*vars(sample), "bias", "layer_norm_bias"})


def foreign_attributes(module: nn.Module, target: type[nn.Module]) -> tuple[dict[str, Any], str]:
    """Attributes that were set on a layer, and the names of those its replacement cannot take."""
    own = own_attributes(type(module))  # type: ignore[arg-type]
    found = {name: value for name, value in vars(module).items() if name not in own}
    taken = own_attributes(target)  # type: ignore[arg-type]
    clashes = [name for name in found if name in taken or hasattr(target, name)]
    return found, ", ".join(clashes)
