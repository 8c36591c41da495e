"""`TEDebugState`: whether a session of the debugger runs."""

from __future__ import annotations

from transformer_engine.pytorch.fp8.autocast import autocast_stack


class _Readable(type):
    @property
    def debug_enabled(cls) -> bool:
        """Whether a session runs."""
        return autocast_stack().inspector is not None


class TEDebugState(metaclass=_Readable):
    """What programs ask about the debugger.

    >>> TEDebugState.debug_enabled
    False
    """

    @staticmethod
    def get_iteration() -> int:
        """How often `debug_api.step()` was called in the running session; 0 without one."""
        inspector = autocast_stack().inspector
        return 0 if inspector is None else int(inspector.iteration)
