"""Threads that use one debugger session at the same time, and try to begin other sessions.

`threads.py` runs this with the native engine under ThreadSanitizer: `python sessions.py ROUNDS`. It
does not import torch, whose threads are not instrumented.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect import _engine

_CONFIG = b"""
log:
  enabled: True
  layers: {layer_name_regex_pattern: fc.*}
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [weight], stats: [max], freq: 2}
"""
_STEPS = 100


def main(rounds: int) -> None:
    """Run the threads; raises the first error that a thread raised."""
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            debug_api.initialize({}, log_dir=folder)
            try:
                _together(_message, _message, _read, _read, _step, _begin_and_end)
            finally:
                debug_api.end_debug()
        print("round", number + 1, flush=True)


def _together(*works: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def _message() -> None:
    for step in range(_STEPS):
        debug_api.log_message(f"step {step}", layer_name="fc1")


def _step() -> None:
    for _ in range(_STEPS):
        debug_api.step()
        debug_api.flush()


def _read() -> None:
    for _ in range(_STEPS):
        config = _engine.parse_yaml(_CONFIG, "config.yaml")
        assert _engine.selects(config["log"]["layers"], "fc1")


def _begin_and_end() -> None:
    """A second session must be refused with a ValueError while one is running."""
    for _ in range(_STEPS // 10):
        try:
            debug_api.initialize({})
        except ValueError as error:
            assert "running session" in str(error), error


if __name__ == "__main__":
    main(int(sys.argv[1]))
