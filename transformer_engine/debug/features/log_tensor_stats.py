"""LogTensorStats: statistics of tensors in high precision."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nvdlfw_inspect.base import FeatureConfig, Key
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.configuration import TENSORS, Scheduled, named
from transformer_engine.debug.session import collector
from transformer_engine.debug.statistics.rows import BLOCKWISE, Kind
from transformer_engine.debug.statistics.subscription import MOMENTS, Source, Subscription

STATISTICS = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
_BOTH_ORIENTATIONS = ("activation", "weight")  # GEMMs take them row-wise and column-wise


@Registry.register_feature(namespace="transformer_engine")
class LogTensorStats(Scheduled):
    """Log statistics of tensors in high precision.

    The micro-batches of a step count as one tensor; for weights, the first micro-batch counts. An
    evaluation (`eval()` under `no_grad`) counts only in steps in which the layer is not trained.
    The ranks of the reduction group count as one tensor too (for weights: the ranks of the tensor
    parallel group). `debug_api.step()` logs the statistics of a step. Taking statistics does not
    change the results of training.

    Keys:
        stats: what to log:
            min, max, mean
            std: unbiased
            l1_norm: sum of magnitudes
            l2_norm: square root of the sum of squares
            cur_amax: the largest magnitude
            dynamic_range: log2 of the largest over the smallest non-zero magnitude
            max_blockwise_dynamic_range: {block_size: 32, dims: 1}: the largest dynamic range of a
                block, which has block_size consecutive elements or, with dims: 2, is a square of
                block_size rows and columns. If blocks do not divide a tensor, the last ones are
                smaller
        tensors / tensors_struct: activation, gradient, weight, output, wgrad, dgrad
        freq, start_step, end_step, start_end_list: in which steps; default: in every step

    Example:
        log_fc1:
          enabled: True
          layers:
            layer_types: [fc1]
          transformer_engine:
            LogTensorStats:
              enabled: True
              tensors: [activation, gradient]
              stats: [mean, std, cur_amax]
              freq: 10
    """

    CONFIG: ClassVar = FeatureConfig(
        statistics=(*STATISTICS, BLOCKWISE),
        statistic_keys={
            BLOCKWISE: {
                "block_size": Key("int", at_least=1),
                "dims": Key("int", at_least=1, at_most=2),
            }
        },
        tensors=TENSORS,
        scheduled=True,
    )
    built_in_statistics = True
    logged_call = "look_at_tensor_before_process"

    def requested_statistics(
        self, config: dict[str, Any], layer: str, tensor: str, schedule: Any
    ) -> list[Subscription]:
        """The statistics that a section of the configuration requests for a tensor of a layer.

        Raises:
            ValueError: a statistic is unknown; configurations that were checked have none.
        """
        where = f"layer {layer}, tensor {tensor}"
        return [_subscription(stat, tensor, schedule, where) for stat in named(config["stats"])]

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
    ) -> None:
        """Take the statistics of a tensor; layers do not call this, their kernels take them."""
        tensor = rowwise_quantized_tensor if tensor is None else tensor
        if tensor is None:
            return
        _check(tensor, layer_name, tensor_name)
        about = (layer_name, tensor_name, tensor.device, tp_group, tp_size)
        statistics = collector().of_call(self, *about)
        if statistics is not None:
            statistics.feed_moments(tensor)
            statistics.feed_blocks(tensor)


def _check(tensor: torch.Tensor, layer: str, name: str) -> None:
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise TypeError(
            "[LogTensorStats] expected a tensor in high precision, got "
            f"{tensor.dtype} (layer {layer}, tensor {name})"
        )


def _subscription(stat: Any, tensor: str, schedule: Any, where: str) -> Subscription:
    if isinstance(stat, dict) and set(stat) == {BLOCKWISE}:
        return _blockwise(stat[BLOCKWISE] or {}, tensor, schedule)
    if stat == BLOCKWISE:
        return _blockwise({}, tensor, schedule)
    if stat not in STATISTICS:
        raise ValueError(
            f"[LogTensorStats] expected stats of {', '.join(STATISTICS)} or "
            f"{BLOCKWISE}: {{block_size: 32, dims: 1}}, got {stat!r} ({where})"
        )
    return Subscription(stat, MOMENTS, stat, schedule)


def _blockwise(options: dict[str, Any], tensor: str, schedule: Any) -> Subscription:
    block, dims = options.get("block_size") or 32, options.get("dims") or 1
    both = tensor in _BOTH_ORIENTATIONS
    name = f"{BLOCKWISE}_block_size_{block}_dims_{dims}"
    source = Source(Kind.BLOCKS, block=block, dims=dims, both=both)
    return Subscription(
        f"{name}_max_over_orientations" if both else name, source, BLOCKWISE, schedule
    )
