"""LogTensorStats of the namespace `base`: statistics of any tensor that the program passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from nvdlfw_inspect import api
from nvdlfw_inspect._engine import schedule_of
from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.debug_features.generic_feature_api import GenericConfigAPIMapper
from nvdlfw_inspect.registry import Registry, api_method
from nvdlfw_inspect.utils import (
    gather_along_first_dim,
    gather_tensor_on_last_rank,
    get_distributed_world_size,
)

_STATISTICS: dict[str, Callable[[Any], Any]] = {
    "min": lambda x: x.min(),
    "max": lambda x: x.max(),
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(),
    "l1_norm": lambda x: x.abs().sum(),
    "l2_norm": lambda x: x.square().sum().sqrt(),
}


@Registry.register_feature(namespace="base")
class LogTensorStats(GenericConfigAPIMapper):
    """Log statistics of a tensor that the program passes to `debug_api.log_tensor_stats`.

    Keys:
        stats: min, max, mean, std, l1_norm, l2_norm, in upper or lower case
        tensors / tensors_struct: names that the program uses
        freq, start_step, end_step, start_end_list: in which steps

    Example:
        log_router:
          enabled: True
          layers:
            layer_types: [router]
          LogTensorStats:
            enabled: True
            tensors: [activation]
            stats: [min, max]

    and in the program `debug_api.log_tensor_stats(layer_name="decoder.router", tensor=logits,
    tensor_name="activation")`.
    """

    CONFIG: ClassVar = FeatureConfig(
        statistics=tuple(_STATISTICS), tensors=None, scheduled=True, any_case=True
    )

    @api_method
    def log_tensor_stats(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor: Any,
        tensor_name: str,
        iteration: int,
        skip_reduction: bool = False,
        reduction_group: Any = None,
    ) -> dict[str, Any]:
        """Log the statistics of a tensor, if they are due.

        Args:
            config: The configuration of the feature for this tensor.
            layer_name: Names the tensor in the logs, together with `tensor_name`.
            tensor: A tensor of any shape and a floating, integer or bool dtype. Statistics are
                computed in float32, those of dtypes of 64 bits in float64.
            tensor_name: The name of the tensor in the configuration.
            iteration: The iteration of the tensor, by default the current one.
            skip_reduction: Use only the tensor of this rank.
            reduction_group: The group over which the tensor is gathered, by default the group of
                `set_tensor_reduction_group`. Without any, the last of all ranks gathers and logs.

        Returns:
            Zero-dimensional tensors by statistic; {} if nothing is due, or if another rank logs.

        Raises:
            ValueError: A statistic is not known.
            TypeError: `tensor` is not a tensor, or `tensor_name` is not a string.
        """
        if not (hasattr(tensor, "detach") and isinstance(tensor_name, str)):
            got = f"{type(tensor).__name__} and {type(tensor_name).__name__}"
            raise TypeError(
                f"[LogTensorStats] expected a torch.Tensor and its name as a str, got {got}"
            )
        if not schedule_of(config).due(iteration):
            return {}
        written = config["stats"]
        names = [n.lower() for n in ([written] if isinstance(written, str) else written)]
        unknown = sorted(set(names) - set(_STATISTICS))
        if unknown:
            raise ValueError(f"[LogTensorStats] Statistic: {unknown} are not supported")
        gathered = tensor.detach()
        if not skip_reduction:
            gathered = self._gather(gathered.reshape(-1), reduction_group, layer_name)
        if gathered is None:
            return {}
        values = _statistics(gathered, names)
        if api.DEBUG_MANAGER is not None:
            numbers = {n: None if v is None else float(v) for n, v in values.items()}
            api.DEBUG_MANAGER.log_statistics(iteration, layer_name, tensor_name, numbers)
        return {name: value for name, value in values.items() if value is not None}

    def _gather(self, tensor: Any, group: Any, layer_name: str) -> Any:
        if get_distributed_world_size() == 1:
            return tensor
        group = group if group is not None else api.get_tensor_reduction_group()
        if group is not None:
            return gather_along_first_dim(tensor, group)[0]
        if api.DEBUG_MANAGER is not None:
            api.DEBUG_MANAGER.log_message(
                "No reduction group is set: the last rank gathers and logs.",
                layer_name,
                level=logging.WARNING,
                once=("LogTensorStats", "no group"),
            )
        return gather_tensor_on_last_rank(tensor)[0]


def _statistics(tensor: Any, names: list[str]) -> dict[str, Any]:
    if tensor.numel() == 0:
        return dict.fromkeys(names)
    exact = tensor.double() if tensor.element_size() > 4 else tensor.float()
    return {name: _STATISTICS[name](exact).float() for name in names}
