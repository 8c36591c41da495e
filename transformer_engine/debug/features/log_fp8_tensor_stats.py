"""LogFp8TensorStats: statistics of casts to FP8."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.configuration import OPERANDS, Scheduled, named
from transformer_engine.debug.session import collector
from transformer_engine.debug.statistics.feeds import MX
from transformer_engine.debug.statistics.rows import Kind
from transformer_engine.debug.statistics.subscription import Source, Subscription
from transformer_engine.pytorch.fp8.recipes.base import registered

STATISTICS = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse")
RECIPES = (*(rules.scaling for rules in registered().values() if rules.scaling), MX)
_NAMES = {
    f"{recipe}{'_' * bool(recipe)}{statistic}{direction}": (recipe, statistic, bool(direction))
    for recipe in ("", *RECIPES)
    for direction in ("", "_columnwise")
    for statistic in STATISTICS
}


@Registry.register_feature(namespace="transformer_engine")
class LogFp8TensorStats(Scheduled):
    """Log what casting to FP8 does to the operands of GEMMs.

    Micro-batches, ranks and steps are treated as by LogTensorStats. A tensor that is not quantised
    (in the requested direction, row-wise or column-wise) has no statistics: a warning says so once.

    Keys:
        stats: what to log, as [<recipe>_]<statistic>[_columnwise]:
            underflows%: percentage of elements that are non-zero before the cast and zero after it
            overflows%: percentage of elements beyond the largest FP8 value at this scale
            mse: mean of the squared error of the cast
            scale_inv_min, scale_inv_max: the smallest and the largest inverse scale
            _columnwise: of the column-wise codes, which one GEMM takes (wgrad of activation and
                gradient, dgrad of weight), instead of the row-wise ones
            fp8_current_scaling_: as if the tensor were cast with current scaling
            fp8_block_scaling_: as if the tensor were cast by Float8BlockScaling(): to E4M3, weights
                in blocks of 128 x 128 and others in blocks of 1 x 128
            mxfp8_: as if the tensor were cast to MXFP8: to E4M3, in blocks of 32 whose scales are
                powers of two (scale_inv is the scale itself, not its exponent; blocks of zeros do
                not count for it)
            fp8_delayed_scaling_: only if delayed scaling is the recipe in use
        tensors / tensors_struct: activation, gradient, weight
        freq, start_step, end_step, start_end_list: in which steps; default: in every step

    Example:
        fp8_health:
          enabled: True
          layers:
            layer_types: [layernorm_linear]
          transformer_engine:
            LogFp8TensorStats:
              enabled: True
              tensors: [activation, gradient]
              stats: [underflows%, overflows%, fp8_current_scaling_underflows%]
              freq: 10
    """

    CONFIG: ClassVar = FeatureConfig(
        statistics=tuple(_NAMES),
        tensors=OPERANDS,
        scheduled=True,
        aliases=("LogFp8Stats",),
    )
    built_in_statistics = True

    def requested_statistics(
        self, config: dict[str, Any], layer: str, tensor: str, schedule: Any
    ) -> list[Subscription]:
        """The statistics that a section of the configuration requests for a tensor of a layer.

        Raises:
            ValueError: a statistic is unknown; configurations that were checked have none.
        """
        where = f"layer {layer}, tensor {tensor}"
        return [_subscription(stat, schedule, where) for stat in named(config["stats"])]

    @api_method
    def inspect_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor_name: str,
        tensor: torch.Tensor | None,
        iteration: int,
        tp_group: Any,
        tp_size: int = 1,
        rowwise_quantized_tensor: torch.Tensor | None = None,
        columnwise_quantized_tensor: torch.Tensor | None = None,
        quantizer: Any = None,
    ) -> None:
        """Take the statistics of a tensor now."""
        known = [t for t in (tensor, rowwise_quantized_tensor) if t is not None]
        if not known:
            return
        about = (layer_name, tensor_name, known[0].device, tp_group, tp_size)
        statistics = collector().of_call(self, *about)
        if statistics is not None:
            statistics.feed_casts(
                tensor, rowwise_quantized_tensor, columnwise_quantized_tensor, quantizer
            )


def _subscription(stat: str, schedule: Any, where: str) -> Subscription:
    if stat not in _NAMES:
        raise ValueError(
            "[LogFp8TensorStats] expected stats of [<recipe>_]<statistic>[_columnwise] with recipe "
            f"{' or '.join(RECIPES)} and statistic {', '.join(STATISTICS)}, got {stat!r} ({where})"
        )
    recipe, statistic, columnwise = _NAMES[stat]
    source = Source(Kind.CASTS, recipe=recipe, columnwise=columnwise)
    return Subscription(stat, source, statistic, schedule)
