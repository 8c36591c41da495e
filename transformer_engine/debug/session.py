"""Follows the debugger's sessions: gives modules an inspector while one runs."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.debug_manager import subscribe
from transformer_engine.debug.inspector import Inspector
from transformer_engine.pytorch.fp8.process_state import process_state


class InspectorListener:
    """Subscribed once, when this module is imported."""

    def initialized(self, manager: Any) -> None:
        """A session begins."""
        process_state().inspector = Inspector(manager)

    def stepped(self, manager: Any) -> None:
        """The count of iterations has changed."""
        inspector = process_state().inspector
        if inspector is not None:
            inspector.stepped()

    moved = stepped

    def ended(self, manager: Any) -> None:
        """The session ends."""
        process_state().inspector = None


subscribe(InspectorListener())
