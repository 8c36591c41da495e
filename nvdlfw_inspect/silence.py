"""`Silence`: explains why a session has logged nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nvdlfw_inspect.report.table import count_of

if TYPE_CHECKING:
    from nvdlfw_inspect._engine import LoadedConfig, Schedule


class Silence:
    """Collects reasons for empty logs during a session.

    Attributes:
        skipped: Messages of features about statistics that they could not take.
    """

    def __init__(self, config: LoadedConfig) -> None:
        self.skipped: list[str] = []
        self._config = config
        self._steps = 0
        self._last = 0
        self._waiting: dict[str, list[Schedule]] = {}  # sections that have not been due yet
        for section, _, _, targets in config.plans([]):
            self._waiting.setdefault(section, []).extend(schedule for _, _, schedule in targets)

    def over(self, iteration: int) -> None:
        """Called when an iteration ends."""
        self._steps += 1
        self._last = iteration
        if self._waiting:
            self._waiting = {
                name: schedules
                for name, schedules in self._waiting.items()
                if schedules and not any(schedule.due(iteration) for schedule in schedules)
            }

    def never_due(self) -> Iterator[str]:
        """Yield a message for every section that was due in no iteration."""
        if not self._steps:
            return
        for name, schedules in self._waiting.items():
            later = [step for s in schedules if (step := s.next(self._last)) is not None]
            when = f"its next step is {min(later)}" if later else "it has no step after that"
            yield f"section {name} never came due: the last step was {self._last}, {when}"

    def reasons(self, layers: Sequence[str]) -> list[str]:
        """Return sentences that say why the logs are empty, after these layers have run."""
        plans = self._config.plans(list(layers))
        if not plans:
            return ["the configuration has no section that is enabled"]
        if not layers:
            return [
                "no layer of transformer_engine.pytorch has run since initialize();"
                " te.convert(model) replaces torch's layers"
            ]
        found = []
        if not self._steps:
            found.append(
                "debug_api.step() was never called: it logs, and goes after each backward pass"
            )
        idle = [f"section {name}" for name, _, selected, _ in plans if not selected]
        found += [
            f"{name} selects none of the {count_of(len(layers), 'layer')} that ran"
            for name in dict.fromkeys(idle)
        ]
        found += [*self.never_due(), *self.skipped]
        return found or ["no feature of the configuration logs statistics"]
