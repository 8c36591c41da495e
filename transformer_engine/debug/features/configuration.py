"""How features read what a configuration says for a tensor."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect._engine import schedule_of
from nvdlfw_inspect.registry import api_method
from transformer_engine.debug.schedules import end_of_run


class Scheduled:
    """Base of features that look at tensors when their schedule says so."""

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether it is due, and the next iteration at which that may change."""
        schedule = schedule_of(config)
        if schedule.due(iteration):
            return True, end_of_run(schedule, iteration)
        return False, schedule.next(iteration)


def named(stats: Any) -> list[Any]:
    """A list where one is documented; what stands alone is a list of one."""
    return list(stats) if isinstance(stats, list | tuple) else [stats]
