"""Base classes and helpers of the built-in features: names of tensors, schedules, results."""

from __future__ import annotations

from typing import Any

import torch

from nvdlfw_inspect import api
from nvdlfw_inspect._engine import schedule_of
from nvdlfw_inspect.base import Key
from nvdlfw_inspect.registry import api_method
from transformer_engine.debug.shared_amax import groups_of
from transformer_engine.pytorch.kernels.amax import amax

OPERANDS = ("activation", "gradient", "weight")
TENSORS = (*OPERANDS, "output", "wgrad", "dgrad")
MARGIN = Key("int", at_least=-126, at_most=127)  # 2^margin is a normal number of fp32


class Scheduled:
    """Base of features that look at tensors when their schedule says so."""

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether the schedule includes this iteration, and the next one that it includes."""
        schedule = schedule_of(config)
        return schedule.due(iteration), schedule.next(iteration)


class Modifying:
    """Base of features that replace tensors, in every iteration."""

    @api_method
    def modify_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, gemm: str, iteration: int
    ) -> bool:
        """True in every iteration."""
        return True

    def amax(
        self, x: torch.Tensor, where: tuple[str, str, str], tp_group: Any, tp_size: int | None
    ) -> torch.Tensor:
        """The amax of the whole tensor, of which `x` is the part on this rank; see `groups_of`.

        `x` is fp32, fp16 or bf16, and contiguous; `where` names the layer, the gemm and the tensor.
        """
        groups = groups_of(where[2], tp_group, tp_size)
        if not groups or api.DEBUG_MANAGER is None:
            return amax(x)
        manager: Any = api.DEBUG_MANAGER
        what = "layer {}, gemm {}, tensor {}".format(*where)
        return manager.statistics.shared_amax.of(x, f"{type(self).__name__} of {what}", groups)

    def log_call(self, layer_name: str, gemm: str, tensor_name: str) -> None:
        """Write a line to the debug log, once for each layer, gemm and tensor."""
        if api.DEBUG_MANAGER is not None:
            text = f"Feature={type(self).__name__}, API=process_tensor: {gemm}, {tensor_name}"
            api.DEBUG_MANAGER.log_message(text, layer_name, once=(text, layer_name))


def delivered(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
    """What `modify_tensor` returns: the tensor, or None after writing it into `out`."""
    if out is None:
        return made
    out.copy_(made)
    return None


def named(stats: Any) -> list[Any]:
    """The value of a key as a list; users may write a single entry without brackets."""
    return list(stats) if isinstance(stats, list | tuple) else [stats]
