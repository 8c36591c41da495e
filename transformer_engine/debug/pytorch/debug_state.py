"""`TEDebugState`: whether a session of the debugger runs."""

from __future__ import annotations

from transformer_engine.pytorch.fp8.process_state import process_state


class _Readable(type):
    @property
    def debug_enabled(cls) -> bool:
        """Whether a session runs."""
        return process_state().inspector is not None


class TEDebugState(metaclass=_Readable):
    """The state of the debugger, for programs.

    >>> TEDebugState.debug_enabled
    False
    """

    @staticmethod
    def get_iteration() -> int:
        """Return the current iteration, which `debug_api.step()` increases; 0 without a session."""
        inspector = process_state().inspector
        return 0 if inspector is None else int(inspector.iteration)
