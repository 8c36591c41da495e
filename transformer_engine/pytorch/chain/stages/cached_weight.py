"""`CachesWeight`: the FP8 weight of a `Matmul`, which it keeps between micro-batches."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.chain.stage import Stage
from transformer_engine.pytorch.chain.stages.matmul_plan import MatmulPlan
from transformer_engine.pytorch.chain.stages.sides import detached, tensors_of
from transformer_engine.pytorch.chain.weight_casts import CachedWeight
from transformer_engine.pytorch.fp8.casts.operands import Operands
from transformer_engine.pytorch.kernels.cast import cast


class CachesWeight(Stage):
    """Base of `Matmul`: casts its weight, and keeps the result between micro-batches."""

    cached_weight: CachedWeight | None

    def caches(self, plan: MatmulPlan) -> bool:
        """Whether the FP8 weight is cached between micro-batches."""
        return plan.fp8 and plan.caches

    def cached(self, plan: MatmulPlan) -> tuple[torch.Tensor | None, ...] | None:
        """The FP8 weight of an earlier micro-batch."""
        found = self._cached(plan)
        return None if found is None else found.tensors

    def detach_cache(self) -> None:
        """Detach the cached weight, which would keep the graph of the first micro-batch alive."""
        if self.cached_weight is not None:
            key, cached, _ = self.cached_weight
            own = Operands(detached(cached.rowwise), detached(cached.columnwise))
            self.cached_weight = CachedWeight(key, own, tensors_of(own))

    def weight_operands(self, weight: torch.Tensor, plan: MatmulPlan) -> Operands:
        """The weight as operands: cached between micro-batches, else cast now."""
        if not plan.fp8 and weight.dtype is not plan.dtype:
            weight = cast(weight, plan.dtype)
        if not plan.caches:
            return plan.quantizers.weight.operands(weight, plan.weight_request)
        cached = self._cached(plan)
        if (plan.first_microbatch and not plan.is_recompute) or cached is None:
            return self.renew(weight, plan)
        return cached.operands

    def renew(self, weight: torch.Tensor, plan: MatmulPlan) -> Operands:
        """Cast the weight and cache it."""
        quantizer, cached = plan.quantizers.weight, self._cached(plan)
        before = None if cached is None else cached.operands
        cast = quantizer.refreshed(weight, plan.weight_request, before)
        self.cached_weight = CachedWeight(quantizer.cache_key, cast, tensors_of(cast))
        return cast

    def _cached(self, plan: MatmulPlan) -> CachedWeight | None:
        """The cached weight, if it has what this plan needs."""
        found = self.cached_weight
        columns = plan.weight_request.columnwise
        if found is None or (found.operands.columnwise is None and columns):
            return None
        return found if found.key == plan.quantizers.weight.cache_key else None
