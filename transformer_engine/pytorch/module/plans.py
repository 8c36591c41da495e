"""Makes the plans of calls of modules with GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.pytorch import _torch_private
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.compiled import operator_key
from transformer_engine.pytorch.chain.plan import CallPlan
from transformer_engine.pytorch.chain.stage import Parameters
from transformer_engine.pytorch.fp8 import weights as fp8_weights
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.casts.quantizers import HIGH_PRECISION_GEMM
from transformer_engine.pytorch.fp8.exporting import exports_inference
from transformer_engine.pytorch.fp8.process_state import Scope, process_state
from transformer_engine.pytorch.fp8.recipe_quantizers import (
    FEATURE_ALIGNMENT,
    ModuleQuantizers,
    build_quantizers,
)
from transformer_engine.pytorch.module.inputs import check_device, checked_dtype
from transformer_engine.pytorch.parallel.groups import check_amax_group
from transformer_engine.pytorch.tensor import QuantizedTensor

if TYPE_CHECKING:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_is_compiling = torch.compiler.is_compiling


def facts_of(parameter: torch.Tensor | None) -> tuple[Any, ...]:
    """What plans depend on in a parameter, beside its class; FP8 weights have parts inside."""
    if parameter is None:
        return ()
    inside = parameter.__tensor_flatten__() if isinstance(parameter, QuantizedTensor) else None
    return parameter.shape, parameter.dtype, parameter.device, inside


def make_plan(
    module: TransformerEngineBaseModule,
    chain: Chain,
    x: torch.Tensor,
    parameters: Parameters,
    needs: tuple[bool, ...],
    autocast: torch.dtype | None,
    first_microbatch: bool | None,
) -> CallPlan:
    """The plan of a call of `chain`; see `TransformerEngineBaseModule.plan_for`."""
    if not _is_compiling() and _torch_private.other_caller_active():  # before state is made
        _torch_private.refuse_other_caller(module.name, (x, *parameters))
    check_device(module, x, parameters)
    dtype = autocast or checked_dtype(module, x, parameters)
    scope = autocast_stack().scope
    own = enumerate(parameters, chain.inputs)
    in_fp8 = [i for i, p in own if isinstance(p, QuantizedTensor)]
    fp8_weights.validate(module, scope.recipe, scope.enabled)
    if _is_compiling() and first_microbatch is None and not in_fp8:
        plan = plan_of_operator(module, chain, scope, dtype, needs, x.device, (x, *parameters))
        if plan is not None:
            return plan
    counts = bool(needs)
    built = _quantizers_in(module, scope, counts, x.device)
    quantizers = built.gemms
    if _is_compiling() and process_state().inspector is not None:
        # Each session is a new object, so code is traced again for it.
        quantizers = process_state().inspector.in_graph(module, quantizers, x.device, dtype)
    needs = needs or (False,) * (chain.inputs + len(parameters))
    plan = CallPlan(dtype, needs, quantizers, first_microbatch)
    plan.counts, plan.columns = counts, built.columns
    plan.fp8_weights = tuple(in_fp8)
    return chain.prepare(plan)


def plan_of_operator(
    module: TransformerEngineBaseModule,
    chain: Chain,
    scope: Scope,
    dtype: torch.dtype,
    needs: tuple[bool, ...],
    device: torch.device,
    tensors: Parameters,
) -> CallPlan | None:
    """The plan of a call that is one operator in compiled code; None to trace it instead."""
    if not chain.kind or exports_inference() or process_state().inspector is not None:
        return None
    if scope.calibrating and not scope.enabled:
        return None
    counts = bool(needs)
    built = _quantizers_in(module, scope, counts, device, in_operator=True)
    gemms = tuple([gemm.description() for gemm in built.gemms])
    if None in gemms:
        return None
    stack = autocast_stack()
    chain.keep_template()
    plan = CallPlan(dtype, needs or (False,) * (chain.inputs - 1 + len(tensors)))
    plan.chain, plan.state = chain, built.state
    how = (counts, stack.entered_in_graph, stack.in_compiled_checkpoint)
    facts = (chain.kind, dtype, plan.needs, gemms, len(built.state), (None,), *how)
    dtypes = tuple([None if t is None else t.dtype for t in tensors])
    plan.facts = (*facts, tuple(module._gemm_weights()), str(device), dtypes)
    values, results = tuple(range(chain.inputs)), tuple(range(len(chain.outputs)))
    outputs = tuple([chain.inputs + i for i in results])
    plan.operator = operator_key(chain.inputs, ((plan.facts, values, values),), outputs)
    return plan


def _quantizers_in(
    module: TransformerEngineBaseModule,
    scope: Scope,
    counts: bool,
    device: torch.device,
    in_operator: bool = False,
) -> ModuleQuantizers:
    """The quantizers of the module's GEMMs; high precision for sizes that FP8 cannot take."""
    if not (scope.enabled or (scope.calibrating and not exports_inference())):
        return ModuleQuantizers([HIGH_PRECISION_GEMM] * module.gemm_count)
    check_amax_group(module.ranks, scope.recipe, scope.group)
    built = build_quantizers(module, scope, counts, device, in_operator)
    if built.moved:
        module.drop_plans()
    for i, shape in enumerate(module._gemm_weights()):
        if scope.enabled and any(size % FEATURE_ALIGNMENT for size in shape):
            _announce_fallback(module, shape)
            built.gemms[i] = HIGH_PRECISION_GEMM
    return built


def _announce_fallback(module: TransformerEngineBaseModule, shape: tuple[int, ...]) -> None:
    module.warn_once(
        shape,
        f"[{type(module).__name__}] expected weight sizes divisible by {FEATURE_ALIGNMENT} for "
        f"FP8, got {shape}: this layer runs in high precision (layer {module.name})",
    )
