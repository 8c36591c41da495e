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

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.node import call_chain
from transformer_engine.pytorch.chain.part import Incoming, Planned
from transformer_engine.pytorch.chain.plan import CallPlan, PlanCache, needs_of
from transformer_engine.pytorch.chain.stage import Parameters
from transformer_engine.pytorch.chain.stages.matmul import Matmul
from transformer_engine.pytorch.dtypes import autocast_dtype
from transformer_engine.pytorch.fp8 import extra_state
from transformer_engine.pytorch.fp8 import weights as fp8_weights
from transformer_engine.pytorch.fp8.autocast_stack import AutocastStack, autocast_stack
from transformer_engine.pytorch.fp8.compiled_scales import record_scope
from transformer_engine.pytorch.fp8.exporting import exports_inference
from transformer_engine.pytorch.fp8.model_init import model_init
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.fp8.recipe_quantizers import (
    with_weight_scales,
)
from transformer_engine.pytorch.fp8.recompute_regions import may_recompute
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.delayed_gradients import DelaysGradients
from transformer_engine.pytorch.module.inputs import (
    check_features,
)
from transformer_engine.pytorch.module.names import layer_name
from transformer_engine.pytorch.module.parameters import HasParameters, matrices_of
from transformer_engine.pytorch.module.plans import facts_of, make_plan
from transformer_engine.pytorch.module.settings import BuildsChain, flag_setting
from transformer_engine.pytorch.notices import warn
from transformer_engine.pytorch.parallel.groups import (
    SharedByRanks,
    TensorParallel,
)
from transformer_engine.pytorch.recompute.module_calls import call_in_region

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

    module_type = "linear"
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
        adds: bool = False,
        residual: torch.Tensor | None = None,
    ) -> Any:
        """Run the chain; this is the hot path of small models.

        `features` is the last size that the input must have, and `bias` the bias of the last GEMM,
        whether the chain adds it or not. With `adds`, `chain.adding` runs; `residual` is its second
        input, if it has one.

        Returns:
            `out[, bias][, tap]`: the bias with `return_bias`, the tap of the chain's Norm.
        """
        check_features(self, x, features)
        if self.first_microbatch is not None:
            first_microbatch = self.first_microbatch
        if self.delay_wgrad_compute and _is_compiling():
            from transformer_engine.pytorch.chain.outside_of_graphs import outside_of_graphs  # noqa: PLC0415

            how = first_microbatch, adds, residual
            return outside_of_graphs(self._call, x, features, parameters, bias, *how)
        stack, chain = autocast_stack(), self.chain.adding if adds else self.chain
        assert chain is not None
        values = (x.contiguous(),) if residual is None else (x.contiguous(), residual.contiguous())
        if not _is_compiling() and may_recompute(stack):
            plan, out = call_in_region(self, chain, values, parameters, first_microbatch)
        else:
            needs = needs_of((*values, *parameters)) if _is_grad_enabled() else ()
            plan, step = self.plan_for(chain, x, parameters, needs, first_microbatch, stack), None
            if stack.step.first_pending and plan.requires_grad:
                step = self.take_backward_end()
            out = call_chain(plan, step, *values, *parameters)
        tapped = len(chain.outputs) > 1
        if not (self.return_bias or tapped):
            return out
        out, *tap = out if tapped else (out,)
        extra = [None if bias is None else bias.to(plan.dtype)] if self.return_bias else []
        return (out, *extra, *tap)

    def plan_call(
        self, values: Incoming, is_first_microbatch: bool | None = None, adds: bool = False
    ) -> Planned | None:
        """The plan and the parameters of a call as a part of a larger chain, see `chain.flow`.

        With `adds` the part is `chain.adding`. None where `forward` does more than run the chain.
        """
        if self.return_bias:
            return None
        parameters, _ = self.chain_parameters()
        needs = values.with_parameters(parameters) if values.records else ()
        first = is_first_microbatch if self.first_microbatch is None else self.first_microbatch
        chain, stack = self.chain.adding if adds else self.chain, autocast_stack()
        assert chain is not None
        return self.plan_for(chain, values.like, parameters, needs, first, stack), parameters

    def plan_for(
        self,
        chain: Chain,
        x: torch.Tensor,
        parameters: Parameters,
        needs: tuple[bool, ...],
        first_microbatch: bool | None,
        stack: AutocastStack,
        in_first_forward: bool = False,
    ) -> CallPlan:
        """The plan of a call in the scope that is open. Plans are cached by what they depend on.

        `chain` is that of the module, or its `adding`; `needs` is empty where gradients are off.
        For `needs` and `in_first_forward` see `CallPlan`.
        """
        autocast = autocast_dtype(x)
        if _is_compiling():
            self._note_compiled()
            return make_plan(self, chain, x, parameters, needs, autocast, first_microbatch)
        scope = stack.scope
        how = (first_microbatch, in_first_forward, chain is self.chain)
        # Types of parameters: a weight in FP8 may be replaced by a plain one.
        key = (scope.number, x.dtype, autocast, needs, x.device, *how, *map(type, parameters))
        found = self._plans.get(key)
        if found is None or found.chain is not chain:
            found = make_plan(self, chain, x, parameters, needs, autocast, first_microbatch)
            if in_first_forward:
                found.requires_grad, found.in_first_forward = False, True
                chain.prepare(found)
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
        """See `torch.nn.Module`. Drops plans if the parameter is of another kind."""
        super().register_parameter(name, param)
        own = self._parameters[name]
        self._plans.registered(name, type(own), facts_of(own))

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
