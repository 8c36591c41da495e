"""Loggers of statistics and of messages."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from nvdlfw_inspect import _engine
from nvdlfw_inspect.utils import frequency, get_distributed_rank, integer, printable, run_all

if TYPE_CHECKING:
    from nvdlfw_inspect._engine import Session


class BaseLogger(ABC):
    """Receives statistics, on the thread that calls `step()`.

    A logger may also define `log_batch(values: dict[str, float], iteration: int)`; it is then
    called once for all statistics of a tensor, instead of `log_scalar` for each.
    """

    @abstractmethod
    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        """Log one value.

        Args:
            name: `{layer}_{tensor}_{statistic}`.
            value: In full precision; may be NaN or infinite.
            iteration: The iteration of the value.
            kwargs: Further arguments of `MetricLogger.log_scalar`.
        """


def require_logger(op: str, logger: object) -> None:
    """Raise TypeError unless `logger` is a `BaseLogger`."""
    if not isinstance(logger, BaseLogger):
        raise TypeError(f"[{op}] expected a BaseLogger, got {type(logger).__name__}")


class TensorboardLogger(BaseLogger):
    """Passes values to a `SummaryWriter`."""

    def __init__(self, tb_writer: Any) -> None:
        self.tb_writer = tb_writer

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        """Add a scalar; `kwargs` are passed to the writer, such as `walltime`."""
        self.tb_writer.add_scalar(name, value, iteration, **kwargs)


def wrap_tensorboard_writer(tb_writer: Any) -> TensorboardLogger:
    """Return a logger that writes to a TensorBoard writer."""
    return TensorboardLogger(tb_writer)


class StatisticsFiles(BaseLogger):
    """Writes the statistics log and the JSON lines of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        """Write a value that is not a statistic of a tensor."""
        self._session.log_scalar(name, float(value), iteration)

    def log_statistics(
        self, iteration: int, layer: str, tensor: str, values: Mapping[str, float | None]
    ) -> None:
        """Write the statistics of a tensor."""
        rows = [(k, None if v is None else float(v)) for k, v in values.items()]
        self._session.log_statistics(iteration, layer, tensor, rows)


class MetricLogger:
    """The loggers that get every statistic."""

    enabled_loggers: ClassVar[list[BaseLogger]] = []

    @staticmethod
    def add_logger(logger: BaseLogger) -> None:
        """Add a logger for the rest of the session.

        Raises:
            TypeError: `logger` is no `BaseLogger`.
        """
        require_logger("add_logger", logger)
        MetricLogger.enabled_loggers.append(logger)

    @staticmethod
    def log_scalar(name: str, value: float, iteration: int, **kwargs: Any) -> None:
        """Pass one value to every logger; if one raises an error, the others get it first."""
        run_all(
            partial(logger.log_scalar, name, value, iteration, **kwargs)
            for logger in MetricLogger.enabled_loggers
        )

    @staticmethod
    def log_statistics(
        iteration: int, layer: str, tensor: str, values: Mapping[str, float | None]
    ) -> None:
        """Pass the statistics of a tensor to every logger, in one call if it has `log_batch`.

        If a logger raises an error, the others get the statistics before the error is raised.
        """
        named = {f"{layer}_{tensor}_{k}": v for k, v in values.items() if v is not None}

        def log_to(logger: Any) -> None:
            if isinstance(logger, StatisticsFiles):
                logger.log_statistics(iteration, layer, tensor, values)
            elif hasattr(logger, "log_batch"):
                if named:
                    logger.log_batch(dict(named), iteration)
            else:
                for name, value in named.items():
                    logger.log_scalar(name, value, iteration)

        run_all(partial(log_to, logger) for logger in MetricLogger.enabled_loggers)


class FileLogger:
    """The debug log of the running session."""

    running: ClassVar[FileLogger | None] = None

    def __init__(self, root_log_dir: str, session: Session) -> None:
        self.root_log_dir = root_log_dir
        self._session = session

    def log_message(self, message: str, level: int = logging.INFO) -> None:
        """Write a line."""
        self._session.log_message(level, printable(message), "", None)

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
        """Write a line of the statistics log."""
        self._session.log_scalar(name, float(value), iteration)


def get_logger() -> FileLogger:
    """Return the debug log.

    Raises:
        RuntimeError: No session is running.
    """
    if FileLogger.running is None:
        raise RuntimeError("[get_logger] expected a running session: call initialize() first")
    return FileLogger.running


def custom_assert(condition: bool, message: str, level: int = logging.ERROR) -> None:
    """Log a message and raise AssertionError if a condition does not hold; for your own features.

    Raises:
        AssertionError: The condition does not hold. If raised in a method of a feature, it becomes
            a RuntimeError that names the call.
    """
    if condition:
        return
    get_logger().log_message(message, level)
    raise AssertionError(message)


def print_rank_0(*messages: object) -> None:
    """Print on the first rank, each part followed by a space."""
    if get_distributed_rank() == 0:
        print("".join(f"{message} " for message in messages), flush=True)


def enable_logging_at_current_step(
    current_step: int,
    freq: int = 1,
    start_step: int | None = None,
    end_step: int | None = None,
    start_end_list: list[list[int]] | None = None,
) -> bool:
    """Return whether a step is due: a multiple of `freq` in one of the intervals.

    Both ends of an interval belong to it. An end of -1 means that it has no end.

    Raises:
        TypeError: `freq`, `start_step` or `end_step` is no integer.
        ValueError: `freq` is below 1.

    Example:
        >>> enable_logging_at_current_step(10, freq=5, start_step=2, end_step=10)
        True
    """
    op = "enable_logging_at_current_step"
    freq = frequency(op, freq)
    ends = {"start_step": start_step, "end_step": end_step}
    said: dict[str, Any] = {k: integer(op, k, v) for k, v in ends.items() if v is not None}
    if start_end_list is not None:
        said["start_end_list"] = start_end_list
    return _engine.schedule_of({"freq": freq, **said}).due(current_step)
