"""`TEDebugState`: the state of the debugger, for features of programs."""

from __future__ import annotations

from transformer_engine.debug import set_weight_tensor_tp_group_reduce
from transformer_engine.pytorch.fp8.process_state import process_state


class _Readable(type):
    @property
    def debug_enabled(cls) -> bool:
        """Whether a session runs."""
        return process_state().inspector is not None

    @property
    def weight_tensor_tp_group_reduce(cls) -> bool:
        """What `set_weight_tensor_tp_group_reduce` has set: whether weights are reduced."""
        # A circular import otherwise: layers import this module, and `session` imports layers.
        from transformer_engine.debug.session import reduces_weights  # noqa: PLC0415

        return reduces_weights()


class TEDebugState(metaclass=_Readable):
    """The state of the debugger, for programs.

    >>> TEDebugState.debug_enabled, TEDebugState.weight_tensor_tp_group_reduce
    (False, True)
    """

    set_weight_tensor_tp_group_reduce = staticmethod(set_weight_tensor_tp_group_reduce)

    @staticmethod
    def get_iteration() -> int:
        """Return the current iteration, which `debug_api.step()` increases; 0 without a session."""
        inspector = process_state().inspector
        return 0 if inspector is None else int(inspector.iteration)
