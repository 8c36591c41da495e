"""FP8 attention: which tensors are cast, and with which scales.

    forward     query, key, value (one scale), softmax result, result
    backward    gradient of the result, of the product query key^T, of query, key, value (one scale)

The scales come from delayed scaling. They are columns of the scaling state of the attention module,
which has room for three GEMMs: the projection before attention, the projection after it, and the
products inside of it. Checkpoints number the columns so. Each tensor above uses one column, and a
`Slot` is the scale and the amax of such a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.attention.core.environment import environment
from transformer_engine.pytorch.fp8.autocast_stack import Step, autocast_stack
from transformer_engine.pytorch.fp8.exporting import exports_inference
from transformer_engine.pytorch.fp8.process_state import Scope
from transformer_engine.pytorch.fp8.recipe_quantizers import (
    BACKWARD_COLUMNS,
    FORWARD_COLUMNS,
    Columns,
    StateInMemory,
    columns_of,
    states_of,
)
from transformer_engine.pytorch.fp8.recipes.base import rules_of
from transformer_engine.pytorch.fp8.recompute_regions import Call, may_recompute
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.fp8.scaling_state import ScalingState
from transformer_engine.pytorch.kernels.amax import amax as amax_of
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.notices import warn_once
from transformer_engine.pytorch.recompute.module_calls import made_in_region

GEMMS = 3
# Columns of the state: output of GEMM 1, input of GEMM 2, output of GEMM 3; then gradients of the
# output of GEMM 1 and of the inputs of GEMM 2 and 3.
_QKV, _OUT, _SOFTMAX = 2, FORWARD_COLUMNS, 3 * FORWARD_COLUMNS - 1
_GRAD_QKV, _GRAD_OUT, _GRAD_PRODUCT = 0, 2 * BACKWARD_COLUMNS - 1, 3 * BACKWARD_COLUMNS - 1
# Columns in the order of the slots of `Casts`.
_FORWARD, _BACKWARD = (_QKV, _SOFTMAX, _OUT), (_GRAD_OUT, _GRAD_PRODUCT, _GRAD_QKV)


class Slot(NamedTuple):
    """How one tensor is cast.

    Attributes:
        scale: fp32 `[1]`.
        amax: fp32 `[1]`, which a cast raises to `max |x|`; None if amaxes are not recorded.
        format: FP8 format, a value of `DType`; None for calibration, which records the amax without
            a cast.
    """

    scale: torch.Tensor
    amax: torch.Tensor | None
    format: int | None

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """FP8 codes in the shape of `x`, and fp32 `[2]` = {1/scale, scale}."""
        assert self.format is not None
        found = quantize(
            x.contiguous(), self.format, self.scale, self.amax, None, True, False, None
        )
        codes, scales = found[0], found[2]
        assert codes is not None and scales is not None
        return codes, scales

    def cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast `x` to FP8 and back to `dtype`."""
        if self.format is None:
            if self.amax is not None:
                torch.maximum(self.amax, amax_of(x.contiguous()), out=self.amax)
            return x.to(dtype)
        codes, scales = self.codes(x)
        return dequantize(codes, self.format, scales, dtype)


class Casts(NamedTuple):
    """All casts of one call of attention.

    Attributes:
        qkv: cast of query, key and value.
        softmax: cast of the softmax result.
        out: cast of the result.
        grad_out: cast of the gradient of the result. None, like the next two, if the backward is in
            high precision.
        grad_product: cast of the gradient of the product query key^T.
        grad_qkv: cast of the gradients of query, key and value.
        qkv_scales: fp32 `[2]` = {1/scale, scale} of query, key and value if these are FP8 codes,
            see `with_codes`; else None.
        dtype: dtype of the values of these codes, and of what is computed from them: fp32, or 16
            bit if cuDNN computes the parts of a context parallel call.
        reduction: whether ranks reduce amaxes, and over which group (None is all ranks).
        step: the autocast step that ends with the backward of the call, or None.
        columns: the columns of scaling state that the slots of the forward use.
        of_state: whether scales and amaxes are the module's own, and no recompute will need copies
            of them. Such calls share a plan. True also for operators of compiled code, which no
            checkpoint recomputes.
        backward_in_fp8: whether the user asks for gradients in FP8, see `AttentionVariables`.
    """

    qkv: Slot
    softmax: Slot
    out: Slot
    grad_out: Slot | None
    grad_product: Slot | None
    grad_qkv: Slot | None
    qkv_scales: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32
    reduction: tuple[bool, Any] = (False, None)
    step: Step | None = None
    columns: Columns | None = None
    of_state: bool = False
    backward_in_fp8: bool | None = None

    def settings(self) -> Casts:
        """These casts without what belongs to one call, so that a plan can have them."""
        return self._replace(step=None, columns=None)

    def description(self) -> tuple[Any, ...]:
        """Constants from which `described_casts` makes the same casts with other tensors."""
        backward = None if self.grad_out is None else self.grad_out.format
        return (self.qkv.format, backward, self.backward_in_fp8)

    def tensors(self) -> list[torch.Tensor]:
        """All scales and amaxes."""
        slots = (self.qkv, self.softmax, self.out, self.grad_out, self.grad_product, self.grad_qkv)
        pairs = [slot[:2] for slot in slots if slot is not None]
        return [tensor for pair in pairs for tensor in pair if tensor is not None]

    @property
    def backward(self) -> tuple[Slot, Slot, Slot]:
        """The slots of gradients, for a backward in FP8."""
        assert self.grad_out is not None
        assert self.grad_product is not None and self.grad_qkv is not None
        return self.grad_out, self.grad_product, self.grad_qkv

    @property
    def by_cudnn(self) -> bool:
        """Whether cuDNN computes parts of the call."""
        return self.dtype is not torch.float32

    @property
    def calibrating(self) -> bool:
        """Whether amaxes are recorded without casts."""
        return self.qkv.format is None

    def with_codes(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Casts]:
        """FP8 codes of query, key and value, and casts with the scales of these codes.

        Amaxes are recorded. For calibration the tensors stay as they are.
        """
        if self.calibrating:
            return [self.qkv.cast(x, x.dtype) for x in tensors], self
        pairs = [self.qkv.codes(x) for x in tensors]
        return [codes for codes, _ in pairs], self._replace(qkv_scales=pairs[0][1])

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """The values in `dtype` of a query, key or value that `with_codes` returned."""
        if self.qkv_scales is None or self.qkv.format is None:
            return x.to(self.dtype)
        return dequantize(x.contiguous(), self.qkv.format, self.qkv_scales, self.dtype)

    def without_backward(self) -> Casts:
        """Casts of a call whose backward is in high precision."""
        return self._replace(grad_out=None, grad_product=None, grad_qkv=None)

    def with_copied_scales(self) -> Casts:
        """Casts with copies of the scales, for a call that will be recomputed."""
        return self._map_forward(lambda slot: slot._replace(scale=slot.scale.clone()))

    def for_recompute(self) -> Casts:
        """Casts for the recompute, which records no amaxes."""
        return self._map_forward(lambda slot: slot._replace(amax=None))

    def _map_forward(self, change: Callable[[Slot], Slot]) -> Casts:
        qkv, softmax, out = map(change, (self.qkv, self.softmax, self.out))
        return self._replace(qkv=qkv, softmax=softmax, out=out)


def casts_of(
    module: ScaledModule, tensors: Sequence[torch.Tensor], checkpointed: bool
) -> Casts | None:
    """The casts of a call of attention in the open scope; None if attention is not in FP8.

    Raises:
        NotImplementedError: a recipe with `fp8_dpa` that is not delayed scaling.
    """
    stack = autocast_stack()
    compiling = torch.compiler.is_compiling()
    in_region = not compiling and may_recompute(stack)
    if not (in_region or asks(stack.scope, module.name)):
        return None
    if compiling and exports_inference() and not stack.scope.enabled:  # no need to calibrate
        return None
    recording = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    device = tensors[0].device
    if in_region:
        return _in_region(module, recording, device)
    recomputed = checkpointed or stack.in_compiled_checkpoint
    casts = casts_in_scope(module, torch.is_grad_enabled(), device, recomputed=recomputed)
    return casts._replace(step=module.take_backward_end()) if recording else casts


def asks(scope: Scope, layer: str) -> bool:
    """Whether a scope asks for FP8 attention, or for its calibration; `layer` is for the error."""
    recipe: Any = scope.recipe
    if not (scope.active and wants_fp8(recipe)):
        return False
    if not rules_of(recipe).fp8_attention:
        raise NotImplementedError(
            "[attention] expected a recipe whose attention can run in FP8, DelayedScaling, got"
            f" {type(recipe).__name__} with fp8_dpa={recipe.fp8_dpa}, fp8_mha={recipe.fp8_mha};"
            f" leave them False for attention in high precision (layer {layer})"
        )
    return True


def wants_fp8(recipe: Recipe | None) -> bool:
    """Whether a recipe asks for FP8 attention; `fp8_mha` implies `fp8_dpa`."""
    return bool(getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False))


def _in_region(module: ScaledModule, recording: bool, device: torch.device) -> Casts | None:
    def make(counts: bool, first: Call | None) -> Casts:
        if first is None:  # a first forward, which must save the same as its recompute
            return casts_in_scope(module, counts, device)._replace(of_state=False)
        return casts_in_scope(module, counts, device, first.scales).for_recompute()

    made = made_in_region(module, recording, lambda scope: asks(scope, module.name), make)
    return None if made is None else made[0]._replace(step=made[1])


def casts_in_scope(
    module: ScaledModule,
    counts: bool,
    device: torch.device,
    scales: torch.Tensor | None = None,
    recomputed: bool = False,
) -> Casts:
    """The casts of a call in the open scope; `counts` says whether amaxes are recorded.

    `scales`, fp32 `[3 * GEMMS]`, take the place of those of the module's state. For `recomputed`
    see `columns_of`.
    """
    stack = autocast_stack()
    scope, compiling = stack.scope, torch.compiler.is_compiling()
    recipe: Any = scope.recipe
    forward, backward = _states(module, counts, device)
    if not compiling:
        stack.join(module.scaling, counts)
    if scales is not None:
        columns = Columns([scales[i : i + 1] for i in _FORWARD], [None] * len(_FORWARD))
    else:
        own, amaxes = forward.columns(_FORWARD)
        columns = Columns(own, amaxes)
        if scope.enabled:
            columns = columns_of(own, amaxes, counts, stack.flushes, recomputed)
    of_grads = [(backward.scales[i], backward.amaxes[i]) for i in _BACKWARD]
    casts = _casts(_description(scope, counts), columns, of_grads)
    of_state = scales is None and not compiling
    return casts._replace(reduction=(recipe.reduce_amax, scope.group), of_state=of_state)


def casts_of_part(
    module: ScaledModule, counts: bool, device: torch.device
) -> tuple[Casts | None, tuple[torch.Tensor, ...]] | None:
    """The casts of a call that is a part of a larger chain.

    Returns:
        A pair. First the casts, or None if attention is not in FP8. In compiled code, where the
        call becomes an operator, these casts have no tensors. Second, in compiled code, the memory
        of the scaling state, from which `described_casts` makes casts with tensors; else `()`.
        For calibration in compiled code, which no operator runs, None instead of a pair.
    """
    scope = autocast_stack().scope
    if not asks(scope, module.name):
        return None, ()
    if not torch.compiler.is_compiling():
        return casts_in_scope(module, counts, device), ()
    if not scope.enabled:
        return None
    forward, backward = _states(module, counts, device)
    without: Any = [None] * len(_FORWARD)
    columns, of_grads = Columns(without, without), [(None, None)] * len(_BACKWARD)
    return _casts(_description(scope, counts), columns, of_grads), (forward.room, backward.room)


def described_casts(description: Sequence[Any], state: StateInMemory) -> Casts:
    """The casts that `Casts.description` describes, with scales and amaxes of `state`."""
    of_grads = list(zip(*state.backward_columns(_BACKWARD), strict=True))
    return _casts(description, state.forward_columns(_FORWARD), of_grads)


def _states(
    module: ScaledModule, counts: bool, device: torch.device
) -> tuple[ScalingState, ScalingState]:
    """The forward and backward states of the module, made to fit the recipe of the open scope."""
    scope = autocast_stack().scope
    recipe: Any = scope.recipe
    forward, backward, moved = states_of(module, recipe, device, scope.leaves_amaxes(counts))
    if moved:
        module.drop_plans()
    if recipe.fp8_mha:
        _announce_mha()
    return forward, backward


def _description(scope: Scope, counts: bool) -> tuple[Any, ...]:
    """`Casts.description` of calls in a scope: two formats, and `Casts.backward_in_fp8`."""
    recipe: Any = scope.recipe
    rules, asked = rules_of(recipe), environment().fp8_backward
    if not scope.enabled:
        return None, None, asked
    backward = rules.backward_format(recipe) if counts and asked is not False else None
    return rules.forward_format(recipe), backward, asked


def _casts(description: Sequence[Any], columns: Columns, of_grads: Sequence[Any]) -> Casts:
    """Casts with these columns of the forward state, and scales and amaxes of the backward."""
    forward, backward, asked = description
    slots = zip(columns.scales, columns.amaxes, strict=True)
    qkv, softmax, out = (Slot(scale, amax, forward) for scale, amax in slots)
    made = [None if backward is None else Slot(scale, amax, backward) for scale, amax in of_grads]
    grad_out, grad_product, grad_qkv = made
    own = (qkv, softmax, out, grad_out, grad_product, grad_qkv)
    return Casts(*own, columns=columns, of_state=True, backward_in_fp8=asked)


def _announce_mha() -> None:
    """Warn once that with `fp8_mha` projections do not read or write FP8 themselves."""
    warn_once(
        "[attention] fp8_mha: tensors between projections and attention are cast to FP8 inside of"
        " attention, as with fp8_dpa; no projection reads or writes them in FP8 itself",
        stacklevel=2,
    )
