"""`quantized_model_init`: modules that keep their weights in FP8 and nothing else."""

from __future__ import annotations

from contextlib import ContextDecorator
from dataclasses import dataclass

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.fp8.autocast import flag_of
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.recipes.base import find_rules, recipe_names


@dataclass(frozen=True)
class ModelInit:
    """How modules that are made now keep the weights of their GEMMs.

    Attributes:
        enabled: weights are kept in FP8.
        recipe: the only recipe that may use these weights; None allows several, see
            `quantized_model_init`.
        preserve: the initial values are also kept in high precision on the CPU.
    """

    enabled: bool = False
    recipe: Recipe | None = None
    preserve: bool = False


_IN_HIGH_PRECISION = ModelInit()


def _check(recipe: Recipe) -> None:
    rules = find_rules(recipe)
    if rules is None:
        refusal = f"expected recipe to be {recipe_names()}, got {recipe!r}"
    else:
        refusal = rules.refusal_of_weights(recipe)
    if refusal:
        raise ValueError(f"[quantized_model_init] {refusal}")


def model_init() -> ModelInit:
    """The settings for modules that are made now."""
    scopes = autocast_stack().model_inits
    return scopes[-1] if scopes else _IN_HIGH_PRECISION


class quantized_model_init(ContextDecorator):
    """Modules made inside keep the weights of their GEMMs in FP8, without a copy in high precision.

    Parameters are `Float8Tensor`s, or `Float8BlockwiseQTensor`s for `Float8BlockScaling`, under the
    dtype that they would have had. Optimizers of torch step them in place. Biases and norms stay in
    high precision. So do weights whose sizes are not divisible by 16, which FP8 cannot take: a
    warning names each. Outside of `autocast` weights in FP8 are dequantised for every call.

    It has no effect on layers of torch, nor on parameters that are put into modules afterwards, as
    by `convert`, or by `from_pretrained` of transformers.

    Args:
        enabled: False makes modules as usual.
        recipe: `DelayedScaling`, `Float8CurrentScaling` or `Float8BlockScaling`, the only one that
            may then use these weights; None allows the first two. It says how scales are rounded
            and with what margin; they always come from the values that are written.
        preserve_high_precision_init_val: keep the values before quantisation on the CPU, for
            optimizers with master weights: `parameter.get_high_precision_init_val()` until
            `parameter.clear_high_precision_init_val()`.

    Raises:
        ValueError: another recipe, or one with other blocks of weights than 128 x 128.
        TypeError: `enabled` or `preserve_high_precision_init_val` is not a bool (or 0, 1 or None).

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> with quantized_model_init():
    ...     layer = te.Linear(16, 32, params_dtype=torch.bfloat16, device="cpu")
    >>> type(layer.weight).__name__, layer.weight.dtype, layer.weight._data.dtype
    ('Float8Tensor', torch.bfloat16, torch.uint8)
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        op, name = type(self).__name__, "preserve_high_precision_init_val"
        enabled = flag_of(op, "enabled", enabled)
        preserve = flag_of(op, name, preserve_high_precision_init_val)
        if enabled and recipe is not None:
            _check(recipe)
        self._init = ModelInit(enabled, recipe, preserve)

    def __enter__(self) -> None:
        stack = autocast_stack()
        stack.model_inits = (*stack.model_inits, self._init)

    def __exit__(self, *exception: object) -> None:
        stack = autocast_stack()
        stack.model_inits = stack.model_inits[:-1]


class fp8_model_init(quantized_model_init):
    """`quantized_model_init` under its older name.

    Args:
        enabled: see `quantized_model_init`.
        recipe: see `quantized_model_init`.
        preserve_high_precision_init_val: see `quantized_model_init`.

    Raises:
        ValueError: see `quantized_model_init`.

    >>> import transformer_engine.pytorch as te
    >>> with fp8_model_init(enabled=True):
    ...     layer = te.Linear(16, 32, device="cpu")
    >>> type(layer.weight).__name__
    'Float8Tensor'
    """
