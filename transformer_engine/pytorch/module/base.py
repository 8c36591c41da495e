"""The base class of all modules with GEMMs.

A call looks up its plan by the facts that it depends on (scope, dtypes, device, which gradients are
needed), makes it the first time, and runs the module's chain with it. Also here: the rules for
dtypes, fallbacks to high precision, and FP8 state in state dicts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from transformer_engine.pytorch import _torch_private
from transformer_engine.pytorch.chain.compiled import operator_key
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.part import Incoming, Planned
from transformer_engine.pytorch.chain.plan import CallPlan, PlanCache, needs_of
from transformer_engine.pytorch.chain.stage import Parameters
from transformer_engine.pytorch.chain.stages.matmul import Matmul
from transformer_engine.pytorch.dtypes import autocast_dtype
from transformer_engine.pytorch.fp8 import extra_state
from transformer_engine.pytorch.fp8 import weights as fp8_weights
from transformer_engine.pytorch.fp8.autocast_stack import AutocastStack, autocast_stack
from transformer_engine.pytorch.fp8.casts.quantizers import HIGH_PRECISION_GEMM
from transformer_engine.pytorch.fp8.compiled_scales import record_scope
from transformer_engine.pytorch.fp8.exporting import exports_inference
from transformer_engine.pytorch.fp8.model_init import model_init
from transformer_engine.pytorch.fp8.process_state import Scope, process_state
from transformer_engine.pytorch.fp8.recipe_quantizers import (
    FEATURE_ALIGNMENT,
    ModuleQuantizers,
    build_quantizers,
    with_weight_scales,
)
from transformer_engine.pytorch.fp8.recompute_regions import may_recompute
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.delayed_gradients import DelaysGradients
from transformer_engine.pytorch.module.inputs import (
    check_device,
    check_features,
    checked_dtype,
)
from transformer_engine.pytorch.module.names import layer_name
from transformer_engine.pytorch.module.parameters import HasParameters, matrices_of
from transformer_engine.pytorch.module.settings import BuildsChain, flag_setting
from transformer_engine.pytorch.notices import warn
from transformer_engine.pytorch.parallel.groups import (
    SharedByRanks,
    TensorParallel,
    check_amax_group,
)
from transformer_engine.pytorch.recompute.module_calls import call_in_region
from transformer_engine.pytorch.tensor import QuantizedTensor

_MOST_PLANS = 64

# Looked up once: attributes of torch cost a tenth of the host time of a call.
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


class TransformerEngineBaseModule(
    BuildsChain, HasParameters, SharedByRanks, DelaysGradients, ScaledModule
):
    """Base of Linear, LayerNormLinear and LayerNormMLP.

    Subclasses build `self.chain` and list the names of their GEMMs; everything that depends on the
    scope (quantizers, scaling state, registration) happens in `_call`, once a call.

    Attributes:
        sequence_parallel: each rank has a part of the tokens outside the parallel region.
    """

    sequence_parallel: bool = flag_setting(lambda module, on: on and module.ranks.size > 1)
    return_bias: bool
    first_microbatch: bool | None = None  # if set, replaces the caller's `is_first_microbatch`
    _shown: ClassVar[tuple[str, ...]] = ()  # attributes that repr names

    def __init__(self, gemms: int, name: str | None, /, **sizes: int) -> None:
        super().__init__(gemms)
        self.name = layer_name(name, type(self).__name__)
        check_sizes(type(self).__name__, self.name, **sizes)
        self.ranks = TensorParallel(type(self).__name__, self.name, None, 1)
        self.primary_weights_in_fp8 = self.fp8_parameters = model_init().enabled
        self.preserve_high_precision_init_val = model_init().preserve
        self._plans = PlanCache()
        self._announced: set[Hashable] = set()

    @property
    def name(self) -> str:
        """The layer's name, for messages, reports and the debugger. It may be set at any time."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        if "chain" in self.__dict__:
            self.chain.rename(name)
            self.drop_plans()
            fp8_weights.rename(self, name)

    def rebuild_chain(self) -> None:
        """See `BuildsChain`; parameters tell trainers of `sequence_parallel`."""
        before = self.ranks.sequence
        super().rebuild_chain()
        if self.ranks.sequence != before:
            self._parameter_set.mark(self, "sequence_parallel", self.ranks.sequence)

    def fixed_settings(self) -> tuple[str, ...]:
        """See `HasSettings`."""
        return ("delay_wgrad_compute",)

    def chain_parameters(self) -> tuple[Parameters, torch.Tensor | None]:
        """The parameters of the chain, and the bias of the last GEMM, for `return_bias`."""
        raise NotImplementedError

    def _gemm_weights(self) -> Sequence[tuple[int, int]]:
        """Shapes `(out, in)` of the weights of this module's GEMMs, in order."""
        raise NotImplementedError

    def parts(self) -> Sequence[TransformerEngineBaseModule]:
        """The modules whose chains run the GEMMs of this one: the module itself by default."""
        return (self,)

    @property
    def gemm_names(self) -> list[str]:
        """Names of the module's GEMMs in the debugger."""
        return [name for part in self.parts() for name in part.chain.gemm_names]

    def _weights(self) -> Sequence[torch.Tensor]:
        """The weights of the GEMMs; a weight in several parameters is put together."""
        raise NotImplementedError

    def renew_weights(self) -> list[int]:
        """Cast the cached weights again, which calls with `is_first_microbatch=False` read.

        Returns the numbers of their GEMMs.
        """
        number = autocast_stack().scope.number
        plans = [p for k, p in self._plans.items() if k[0] == number]
        plans = [p for p in plans if p.first_microbatch is False]
        renewed = []
        for plan in sorted(plans, key=lambda plan: plan.requires_grad)[-1:]:
            weights = self._weights()
            for stage, own in plan.caching:
                assert isinstance(stage, Matmul)
                stage.renew(weights[stage.index].contiguous(), own)
                renewed.append(stage.index)
        return renewed

    def _call(
        self,
        x: torch.Tensor,
        features: int,
        parameters: Parameters,
        bias: torch.Tensor | None,
        first_microbatch: bool | None,
    ) -> Any:
        """Run the chain; this is the hot path of small models.

        `features` is the last size that the input must have, and `bias` the bias of the last GEMM,
        whether the chain adds it or not.

        Returns:
            `out[, bias][, tap]`: the bias with `return_bias`, the tap of the chain's Norm.
        """
        check_features(self, x, features)
        if self.first_microbatch is not None:
            first_microbatch = self.first_microbatch
        if self.delay_wgrad_compute and _is_compiling():
            from transformer_engine.pytorch.chain.outside_of_graphs import outside_of_graphs  # noqa: PLC0415

            return outside_of_graphs(self._call, x, features, parameters, bias, first_microbatch)
        stack = autocast_stack()
        if not _is_compiling() and may_recompute(stack):
            plan, out = call_in_region(self, x, parameters, first_microbatch)
        else:
            needs = needs_of(x.requires_grad, parameters) if _is_grad_enabled() else ()
            plan, step = self.plan_for(x, parameters, needs, first_microbatch, stack), None
            if stack.step.first_pending and plan.requires_grad:
                step = self.take_backward_end()
            out = call_chain(plan, step, x.contiguous(), *parameters)
        tapped = len(self.chain.outputs) > 1
        if not (self.return_bias or tapped):
            return out
        out, *tap = out if tapped else (out,)
        extra = [None if bias is None else bias.to(plan.dtype)] if self.return_bias else []
        return (out, *extra, *tap)

    def plan_call(
        self, values: Incoming, is_first_microbatch: bool | None = None
    ) -> Planned | None:
        """The plan and the parameters of a call as a part of a larger chain, see `chain.flow`.

        None where `forward` does more than run the chain.
        """
        if self.return_bias:
            return None
        parameters, _ = self.chain_parameters()
        needs = values.with_parameters(parameters) if values.records else ()
        first = is_first_microbatch if self.first_microbatch is None else self.first_microbatch
        return self.plan_for(values.like, parameters, needs, first, autocast_stack()), parameters

    def plan_for(
        self,
        x: torch.Tensor,
        parameters: Parameters,
        needs: tuple[bool, ...],
        first_microbatch: bool | None,
        stack: AutocastStack,
        in_first_forward: bool = False,
    ) -> CallPlan:
        """The plan of a call in the scope that is open. Plans are cached by what they depend on.

        `needs` is empty where gradients are off. For it and `in_first_forward` see
        `CallPlan`.
        """
        autocast = autocast_dtype(x)
        if _is_compiling():
            self._note_compiled()
            return self._make_plan(x, parameters, needs, autocast, first_microbatch)
        scope = stack.scope
        how = (first_microbatch, in_first_forward)
        # Types of parameters: a weight in FP8 may be replaced by a plain one.
        key = (scope.number, x.dtype, autocast, needs, x.device, *how, *map(type, parameters))
        found = self._plans.get(key)
        if found is None or found.chain is not self.chain:
            found = self._make_plan(x, parameters, needs, autocast, first_microbatch)
            if in_first_forward:
                found.requires_grad, found.in_first_forward = False, True
                self.chain.prepare(found)
            if len(self._plans) >= _MOST_PLANS:  # a new recipe in each step would add one each
                self.drop_plans()
            self._plans[key] = found
        if scope.key >= 0:
            stack.join(self.scaling, found.counts)
        inspector = process_state().inspector
        if inspector is not None and inspector.tick >= found.inspect_at:
            return inspector.plan_for(self, found)
        return found

    def _note_compiled(self) -> None:
        """Check the scope of a compiled recompute; compiled code has no recompute regions."""
        if not exports_inference():
            # Names would become guards, and layers that are alike could not share a graph.
            kind, weights = type(self).__name__, tuple(self._gemm_weights())
            record_scope(kind, weights, autocast_stack().scope.enabled)

    def _make_plan(
        self,
        x: torch.Tensor,
        parameters: Parameters,
        needs: tuple[bool, ...],
        autocast: torch.dtype | None,
        first_microbatch: bool | None,
    ) -> CallPlan:
        if not _is_compiling() and _torch_private.other_caller_active():  # before state is made
            _torch_private.refuse_other_caller(self.name, (x, *parameters))
        check_device(self, x, parameters)
        dtype = autocast or checked_dtype(self, x, parameters)
        scope = autocast_stack().scope
        in_fp8 = [i for i, p in enumerate(parameters, 1) if isinstance(p, QuantizedTensor)]
        fp8_weights.validate(self, scope.recipe, scope.enabled)
        if _is_compiling() and first_microbatch is None and not in_fp8:
            plan = self._plan_of_operator(scope, dtype, needs, x.device, (x, *parameters))
            if plan is not None:
                return plan
        counts = bool(needs)
        built = self._quantizers_in(scope, counts, x.device)
        quantizers = built.gemms
        if _is_compiling() and process_state().inspector is not None:
            # Each session is a new object, so code is traced again for it.
            quantizers = process_state().inspector.in_graph(self, quantizers, x.device, dtype)
        needs = needs or (False,) * (1 + len(parameters))
        plan = CallPlan(dtype, needs, quantizers, first_microbatch)
        plan.counts, plan.columns = counts, built.columns
        plan.fp8_weights = tuple(in_fp8)
        return self.chain.prepare(plan)

    def _plan_of_operator(
        self,
        scope: Scope,
        dtype: torch.dtype,
        needs: tuple[bool, ...],
        device: torch.device,
        tensors: Parameters,
    ) -> CallPlan | None:
        """The plan of a call that is one operator in compiled code; None to trace it instead."""
        chain = self.chain
        if not chain.kind or exports_inference() or process_state().inspector is not None:
            return None
        if scope.calibrating and not scope.enabled:
            return None
        counts = bool(needs)
        built = self._quantizers_in(scope, counts, device, in_operator=True)
        gemms = tuple([gemm.description() for gemm in built.gemms])
        if None in gemms:
            return None
        stack = autocast_stack()
        chain.keep_template()
        plan = CallPlan(dtype, needs or (False,) * len(tensors))
        plan.chain, plan.state = chain, built.state
        how = (counts, stack.entered_in_graph, stack.in_compiled_checkpoint)
        facts = (chain.kind, dtype, plan.needs, gemms, len(built.state), (None,), *how)
        dtypes = tuple([None if t is None else t.dtype for t in tensors])
        plan.facts = (*facts, tuple(self._gemm_weights()), str(device), dtypes)
        values, results = tuple(range(chain.inputs)), tuple(range(len(chain.outputs)))
        outputs = tuple([chain.inputs + i for i in results])
        plan.operator = operator_key(chain.inputs, ((plan.facts, values, values),), outputs)
        return plan

    def _quantizers_in(
        self, scope: Scope, counts: bool, device: torch.device, in_operator: bool = False
    ) -> ModuleQuantizers:
        """The quantizers of this module's GEMMs; high precision for sizes that FP8 cannot take."""
        if not (scope.enabled or (scope.calibrating and not exports_inference())):
            return ModuleQuantizers([HIGH_PRECISION_GEMM] * self.gemm_count)
        check_amax_group(self.ranks, scope.recipe, scope.group)
        built = build_quantizers(self, scope, counts, device, in_operator)
        if built.moved:
            self.drop_plans()
        for i, shape in enumerate(self._gemm_weights()):
            if scope.enabled and any(size % FEATURE_ALIGNMENT for size in shape):
                self._announce_fallback(shape)
                built.gemms[i] = HIGH_PRECISION_GEMM
        return built

    def _announce_fallback(self, shape: tuple[int, ...]) -> None:
        self.warn_once(
            shape,
            f"[{type(self).__name__}] expected weight sizes divisible by {FEATURE_ALIGNMENT} for "
            f"FP8, got {shape}: this layer runs in high precision (layer {self.name})",
        )

    def warn_once(self, about: Hashable, text: str) -> None:
        """Warn once for each subject `about`."""
        if torch.compiler.is_compiling():
            warn(text)
        elif about not in self._announced:
            self._announced.add(about)
            warn(text, stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        # A copy must make its own plans, because these point into this module's scaling state.
        return {**super().__getstate__(), "_plans": PlanCache()}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See `torch.nn.Module`. Drops plans, because the parameter may be of another kind."""
        super().register_parameter(name, param)
        self.drop_plans()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.drop_plans()
        apply = super()._apply
        fp8_weights.apply_fn(self, fn, lambda: apply(fn, recurse))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            fp8_weights.dequantized(self, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        assigned = local_metadata.get("assign_to_params_buffers", False)
        quantized = fp8_weights.quantized(self, state_dict, prefix, assigned)
        super()._load_from_state_dict(quantized, prefix, local_metadata, *others)

    def get_extra_state(self) -> torch.Tensor:
        """FP8 scaling state as a uint8 tensor of fixed layout; empty where there is none."""
        process_state().flush()
        scaling, weights = self.scaling, fp8_weights.scales_of(self)
        if scaling and [w.numel() for w in weights] == [2] * self.gemm_count:
            scaling = with_weight_scales(scaling, weights)
        return extra_state.pack(scaling, weights)

    def set_extra_state(self, state: Any) -> None:
        """Restore FP8 scaling state; None and empty tensors leave it as it is.

        The scales of FP8 weights in it are for `load_state_dict`, which casts with them.

        Raises:
            ValueError: damaged contents, too many, or those of a layer with another number of
                GEMMs.
        """
        matrices = matrices_of(self, self._parameter_set)
        self.restore_scaling(extra_state.unpack(state, self.name, matrices))

    def extra_repr(self) -> str:
        """Sizes, other settings, and the name of the layer."""
        shown = (*self._shown, "name")
        return ", ".join(f"{one.removeprefix('use_')}={getattr(self, one)!r}" for one in shown)
