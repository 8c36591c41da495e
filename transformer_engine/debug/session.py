"""Gives each session of the debugger a collector of statistics and an inspector of modules."""

from __future__ import annotations

import logging
import sys
from typing import Any

from nvdlfw_inspect import api
from nvdlfw_inspect.debug_manager import subscribe
from transformer_engine.debug.inspector import Inspector
from transformer_engine.debug.statistics.collector import Collector
from transformer_engine.pytorch.fp8.process_state import process_state

_NEVER_STEPPED = (
    "[step] statistics were taken but never written: expected a call of debug_api.step() after each"
    " backward pass, got none"
)


class SessionListener:
    """The listener of sessions, subscribed once, when this module is imported."""

    def __init__(self) -> None:
        self.weights_over_tp_group = True

    def initialized(self, manager: Any) -> None:
        """Called when a session begins."""
        manager.statistics = Collector(manager, self.weights_over_tp_group)
        manager.drain.append(manager.statistics.drain)
        process_state().inspector = Inspector(manager)

    def stepped(self, manager: Any) -> None:
        """Called when an iteration ends."""
        self._inspector_follows()
        manager.statistics.step()

    def moved(self, manager: Any) -> None:
        """Called when the program sets the iteration."""
        self._inspector_follows()
        manager.statistics.moved()

    def _inspector_follows(self) -> None:
        inspector = process_state().inspector
        if inspector is not None:
            inspector.stepped()

    def ended(self, manager: Any) -> None:
        """Called when a session ends."""
        process_state().inspector = None
        lost = manager.statistics.taking() and not manager.statistics.stepped
        manager.statistics.end()
        if lost and not hasattr(sys, "last_value"):  # unless an exception ends the program
            manager.log_message(_NEVER_STEPPED, level=logging.WARNING)
        if manager.statistics.cost.steps:
            manager.log_message(str(manager.statistics.cost))


_LISTENER = SessionListener()
subscribe(_LISTENER)


def collector() -> Collector:
    """Return the collector of the running session.

    Raises:
        RuntimeError: no session is running.
    """
    manager: Any = api.DEBUG_MANAGER
    if manager is None:
        raise RuntimeError("[statistics] expected a session: call debug_api.initialize() first")
    return manager.statistics


def reduce_weights(enabled: bool) -> None:
    """See `transformer_engine.debug.set_weight_tensor_tp_group_reduce`."""
    _LISTENER.weights_over_tp_group = enabled
    if api.DEBUG_MANAGER is not None:
        collector().weights_over_tp_group = enabled


def reduces_weights() -> bool:
    """Return what `reduce_weights` has set; True by default."""
    return _LISTENER.weights_over_tp_group
