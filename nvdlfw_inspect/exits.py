"""`ExitHooks`: ends the session of a program that exits without `end_debug()`."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
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
        self._handler: Any = None  # the last one that was installed, and not removed
        self._previous: Any = None  # the handler before that
        atexit.register(self._at_exit)

    def install(self) -> None:
        """Install the handler of SIGTERM. Only a main thread may; other threads do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is self._handler or previous is None:  # None: of C code, we could not call it
            return
        self._process = os.getpid()
        self._previous, self._handler = previous, partial(self._handle, previous)
        signal.signal(signal.SIGTERM, self._handler)

    def remove(self) -> None:
        """Restore the previous handler, unless another one has been installed since."""
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._previous)
            self._handler = None

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._end()

    def _handle(self, previous: Any, number: int, frame: FrameType | None) -> None:
        try:
            if os.getpid() == self._process:
                self._drain()
        finally:
            if callable(previous):
                previous(number, frame)
            elif previous == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
