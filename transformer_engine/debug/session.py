"""Follows the debugger's sessions: gives modules an inspector while one runs."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.debug_manager import subscribe
from transformer_engine.debug.inspector import Inspector
from transformer_engine.pytorch.fp8.autocast import autocast_stack


class InspectorListener:
    """Subscribed once, when this module is imported."""

    def initialized(self, manager: Any) -> None:
        """A session begins."""
        autocast_stack().inspector = Inspector(manager)

    def stepped(self, manager: Any) -> None:
        """The count of iterations has changed."""
        inspector = autocast_stack().inspector
        if inspector is not None:
            inspector.stepped()

    moved = stepped

    def ended(self, manager: Any) -> None:
        """The session ends."""
        autocast_stack().inspector = None


subscribe(InspectorListener())
