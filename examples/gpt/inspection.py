"""Runs the precision debugger during a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nvdlfw_inspect.api as debug_api
from gpt.settings import UsageError


@contextmanager
def inspection(config: Path | None, log_dir: Path, step: int) -> Iterator[None]:
    """Inspect the training within the `with` block; without a configuration, do nothing.

    Args:
        config: a YAML file; see `config.yaml`.
        log_dir: directory of the logs.
        step: the training step that comes next.

    Raises:
        UsageError: the configuration has mistakes; the message has the first one, in one line.
    """
    if config is None:
        yield
        return
    try:
        debug_api.initialize(config_file=config, log_dir=log_dir, init_training_step=step)
    except (ValueError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(
            f"--inspect: {first} (python -m nvdlfw_inspect check {config} shows all mistakes)"
        ) from error
    try:
        yield
    finally:
        debug_api.end_debug()
    print(f"inspected: python -m nvdlfw_inspect summary {log_dir}")
