"""`module.fp8_meta`: a module's FP8 state, read-only, under the names that programs expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from transformer_engine.pytorch.fp8.autocast import get_default_recipe
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.process_state import Scope, process_state
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD, ScalingState

if TYPE_CHECKING:
    from transformer_engine.pytorch.fp8.scaled_module import ScaledModule

_SCALES = {"scaling_fwd": FORWARD, "scaling_bwd": BACKWARD}


class Fp8Scales:
    """Scales and amaxes of one direction: the state's own tensors, as they are now.

    For each GEMM, the columns of the forward are those of input, weight and output; the columns of
    the backward are those of the gradients of output and input.
    """

    _state: ScalingState
    _layer: str

    def __init__(self, state: ScalingState, layer: str) -> None:
        vars(self).update(_state=state, _layer=layer)

    @property
    def scale(self) -> torch.Tensor:
        """fp32 `[columns]`: the factors by which values are multiplied before the cast."""
        return self._state.scale

    @property
    def scale_inv(self) -> torch.Tensor:
        """fp32 `[columns]`, computed from `scale`."""
        return self.scale.reciprocal()

    @property
    def amax_history(self) -> torch.Tensor:
        """fp32 `[length, columns]`; row 0 has the amaxes of the running step."""
        return self._state.amax_history

    def __setattr__(self, name: str, value: object) -> None:
        _refuse_write(name, self._layer)


class Fp8Meta(Mapping[str, Any]):
    """A read-only view of the FP8 state.

    - `recipe`, `fp8_group`: those of the open autocast; else those of the newest plan in FP8; else
      the defaults.
    - `fp8_max_fwd`, `fp8_max_bwd`: largest values of that recipe's formats; absent for a
      `CustomRecipe`.
    - `num_gemms`: how many GEMMs the scales are for.
    - `fp8_checkpoint`: whether state dicts of the module carry scales; never in `GroupedLinear`,
      where Megatron-Core would unpickle the state to take it apart.
    - `scaling_fwd`, `scaling_bwd`: see `Fp8Scales`; absent before delayed scaling.

    >>> import transformer_engine.pytorch as te
    >>> layer = te.Linear(16, 16, device="cpu")
    >>> with te.fp8_autocast(enabled=True):
    ...     y = layer(torch.ones(16, 16))
    >>> layer.fp8_meta["scaling_fwd"].scale[0]
    tensor(448.)
    """

    def __init__(self, module: ScaledModule) -> None:
        self._module = module

    def _values(self) -> dict[str, Any]:
        module = self._module
        scope = _scope_of(module)
        recipe: Any = scope.recipe or get_default_recipe()
        process_state().flush()
        scaling = module.scaling
        return {
            "recipe": recipe,
            "fp8_group": scope.group,
            **_largest(recipe),
            "num_gemms": module.gemm_count,
            "fp8_checkpoint": bool(scaling) and not module.joint_state,
            **{
                key: Fp8Scales(scaling[direction], module.name)
                for key, direction in _SCALES.items()
                if direction in scaling
            },
        }

    def __getitem__(self, key: str) -> Any:
        values = self._values()
        if key in _SCALES and key not in values:
            raise KeyError(
                f"[fp8_meta] expected {key!r} of a layer that has run with DelayedScaling, got one "
                f"that has no scales (layer {self._module.name})"
            )
        return values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __setitem__(self, key: str, value: object) -> None:
        """Accept a value that is already there; any other write is an error."""
        values = self._values()
        if key in _SCALES or key not in values or values[key] != value:
            _refuse_write(key, self._module.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values()})"


def _largest(recipe: Any) -> dict[str, float]:
    if recipe.custom():
        return {}
    values = recipe.fp8_format.value
    return {"fp8_max_fwd": values.max_fwd, "fp8_max_bwd": values.max_bwd}


def _scope_of(module: ScaledModule) -> Scope:
    """The open autocast scope; else that of the newest plan in FP8, if there is one."""
    stack = autocast_stack()
    if stack.scope.active:
        return stack.scope
    last = last_scope(module)
    if last is not None:
        return last
    for state in module.scaling.values():
        if state.group is not None:
            return Scope(True, False, state.group.recipe, state.group.process_group)
    return stack.scope


def last_scope(module: ScaledModule) -> Scope | None:
    """The scope of the newest of the module's plans in FP8."""
    known = {scope.number: scope for scope in [*process_state().scopes] if scope.enabled}
    parts: Any = getattr(module, "parts", tuple)()  # keys of attention's plans name no scope
    numbers = [key[0] for part in parts for key in part._plans]
    return next((known[number] for number in reversed(numbers) if number in known), None)


def _refuse_write(name: str, layer: str) -> NoReturn:
    raise TypeError(
        f"[fp8_meta] expected no assignment, because it only shows the FP8 state, got one to "
        f"{name!r}: pass a recipe or group to autocast, and load scales with load_state_dict "
        f"(layer {layer})"
    )
