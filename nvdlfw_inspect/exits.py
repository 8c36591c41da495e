"""`ExitHooks`: ends the session of a program that exits without `end_debug()`."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class ExitHooks:
    """Ends the session at exit, and drains it on SIGTERM before the previous handler runs.

    Forked children, such as workers that load data, do not touch the session of their parent.
    """

    def __init__(self, end: Callable[[], None], drain: Callable[[], None]) -> None:
        self._drain = drain
        self._end = end
        self._process = os.getpid()
        self._previous: Any = None
        self._installed = False
        atexit.register(self._at_exit)

    def install(self) -> None:
        """Install the handler of SIGTERM. Only a main thread may; other threads do nothing."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None:  # installed by C code, which we could not call afterwards
            return
        self._process = os.getpid()
        self._previous = previous
        signal.signal(signal.SIGTERM, self._handle)
        self._installed = True

    def remove(self) -> None:
        """Restore the previous handler, unless another one has been installed since."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
            self._installed = False

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            if os.getpid() == self._process:
                self._drain()
        finally:
            if callable(self._previous):
                self._previous(number, frame)
            elif self._previous == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
