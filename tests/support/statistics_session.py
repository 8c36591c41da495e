"""A debugger session with statistics only, without configuration or files."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from transformer_engine.debug.statistics.collector import Collector
from transformer_engine.debug.statistics.subscription import MOMENTS, Subscription

NO_END = 2**63 - 1


@dataclass(frozen=True)
class Every:
    """A schedule: multiples of `freq` in `[start, end]`."""

    freq: int = 1
    start: int = 0
    end: int = NO_END

    @property
    def intervals(self) -> list[tuple[int, int]]:
        return [(self.start, self.end)]

    def due(self, iteration: int) -> bool:
        return self.start <= iteration <= self.end and iteration % self.freq == 0

    def next(self, iteration: int) -> int | None:
        after = max(iteration + 1, self.start)
        after += -after % self.freq
        return after if after <= self.end else None


@dataclass
class Requests:
    """A built-in feature whose requests are the same for all tensors."""

    subscriptions: list[Subscription]
    built_in_statistics: bool = True

    def requested_statistics(self, *asked: Any) -> list[Subscription]:
        return self.subscriptions


def moments_of(*names: str, schedule: Any = None) -> list[Subscription]:
    """Subscriptions to statistics of moments."""
    return [Subscription(name, MOMENTS, name, schedule or Every()) for name in names]


@dataclass
class FakeManager:
    """Routes the layers in `requests`; stores logged values by iteration, layer and tensor."""

    requests: dict[str, list[Subscription]]
    config_hash: int = 1
    iteration: int = 0
    logged: dict[tuple[int, str, str], dict[str, float | None]] = field(default_factory=dict)
    order: list[tuple[int, str, str]] = field(default_factory=list)
    _tensor_reduction_group: Any = None
    text: Any = field(default_factory=Every)

    def route(self, namespace: str, layer: str, call: str, tensor: str) -> list[Any]:
        found = self.requests.get(layer)
        if found is None:
            return []
        return [SimpleNamespace(feature=Requests(found), config={}, schedule=None)]

    def schedules(self, feature: str) -> list[tuple[str, Any]]:
        return [("activation", self.text)]

    def log_statistics(self, iteration: int, layer: str, tensor: str, values: Any) -> None:
        key = (iteration, layer, tensor)
        assert key not in self.logged
        self.logged[key] = dict(values)
        self.order.append(key)


class Session:
    """A manager and its collector. A hook calls `feed`, the user's code calls `step`."""

    def __init__(self, manager: FakeManager) -> None:
        self.manager = manager
        self.collector = Collector(manager)

    def feed(self, layer: str, tensor: str, x: torch.Tensor, captured: bool = False) -> None:
        found = self.collector.tensor(layer, tensor, x.device)
        if found is not None:
            found.feed_moments(x, captured)

    def step(self) -> None:
        self.manager.iteration += 1
        self.collector.step()

    def logged(self) -> dict[tuple[int, str, str], dict[str, float | None]]:
        self.collector.drain()
        return self.manager.logged
