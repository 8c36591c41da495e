"""Starts a session from the arguments of `initialize`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvdlfw_inspect import _engine, _env
from nvdlfw_inspect.calls import Calls
from nvdlfw_inspect.debug_manager import DebugManager
from nvdlfw_inspect.engine import engine
from nvdlfw_inspect.excerpt import pointed
from nvdlfw_inspect.loading import FeatureLoader
from nvdlfw_inspect.logging import (
    BaseLogger,
    MetricLogger,
    StatisticsFiles,
    TensorboardLogger,
    require_logger,
)
from nvdlfw_inspect.registry import Registry, import_built_in
from nvdlfw_inspect.utils import get_distributed_rank, printable, step_number, warn_user

PathLike = str | os.PathLike[str]


class MissingFileError(FileNotFoundError, ValueError):
    """A file or directory that an argument names does not exist."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `nvdlfw_inspect.api.initialize`, which documents them."""

    config_file: PathLike | dict[str, Any] | None
    feature_dirs: PathLike | list[PathLike] | tuple[PathLike, ...] | None
    statistics_logger: BaseLogger | None
    log_dir: Any  # a path; `start` refuses anything else
    init_training_step: int = 0
    tb_writer: Any = None
    default_logging_enabled: bool = False
    log_timestamps: bool = True

    @property
    def absolute_log_dir(self) -> str:
        """`log_dir` as an absolute path: the program may change its directory later."""
        return str(Path(self.log_dir).absolute())

    @property
    def statistics_files(self) -> bool:
        """Whether statistics go to files; without another logger they always do."""
        other = self.statistics_logger is not None or self.tb_writer is not None
        return self.default_logging_enabled or not other


@dataclass(frozen=True)
class _Source:
    """A configuration as it was passed."""

    content: bytes | dict[str, Any] = field(default_factory=dict)
    origin: str = "<none>"
    message: str = ""  # for the debug log

    @classmethod
    def of(cls, config_file: Any) -> _Source:
        if config_file is None or config_file == "":
            return cls()
        if isinstance(config_file, dict):
            return cls(config_file, "<dict>", "Reading config from Python dictionary.")
        if not isinstance(config_file, (str, os.PathLike)):
            got = type(config_file).__name__
            raise TypeError(f"[initialize] expected config_file as a path or a dict, got {got}")
        path = Path(config_file)
        if not path.is_file():
            what = "a directory" if path.is_dir() else "no such file"
            raise MissingFileError(
                f"[initialize] expected a configuration file, got {config_file}: {what}; "
                "config_file=None runs without features, and built-in features need no feature_dirs"
            )
        name = printable(config_file)
        return cls(path.read_bytes(), name, f"Reading config from {name}.")


def check(settings: Settings) -> None:
    """Raise the errors of `start` that can be known while another session runs.

    With `feature_dirs`, only the arguments are checked, because a check of the configuration would
    have to run the files of these directories.

    Raises:
        TypeError, ValueError: An argument or the configuration is wrong.
    """
    source, directories, _ = _checked(settings)
    if not directories:
        _load(source, import_built_in())


def start(settings: Settings) -> DebugManager:
    """Start a session.

    Raises:
        TypeError, ValueError: An argument or the configuration is wrong.
        RuntimeError: A feature cannot be created.
    """
    source, directories, first_step = _checked(settings)
    loader = FeatureLoader(directories)
    calls = Calls(loader.load)
    callouts = _engine.Callouts(calls)
    session: _engine.Session | None = None
    try:
        with loader.loading():
            missing = import_built_in()
            broken = engine().discover(directories, callouts)
        for path, reason in broken:
            warn_user(f"[initialize] feature file {path} cannot be loaded: {reason}")
        for slip in Registry.slips():
            warn_user(f"[register_feature] {slip}")
        config = _load(source, [*missing, *broken])
        calls.instances = Registry.instantiate()
        session = engine().begin(config, callouts, _log_options(settings))
        session.iteration = first_step
        return _manager(settings, source, session, calls, config)
    except BaseException:  # leave nothing behind for the next session
        if session is not None:
            session.finish()
        MetricLogger.enabled_loggers.clear()
        Registry.reset()
        raise


def _checked(settings: Settings) -> tuple[_Source, list[str], int]:
    """Return the configuration, the feature directories and the first step."""
    if settings.statistics_logger is not None:
        require_logger("initialize", settings.statistics_logger)
    if settings.tb_writer is not None and not hasattr(settings.tb_writer, "add_scalar"):
        got = type(settings.tb_writer).__name__
        raise TypeError(f"[initialize] expected tb_writer with add_scalar, got {got}")
    if not isinstance(settings.log_dir, (str, os.PathLike)):
        got = type(settings.log_dir).__name__
        raise TypeError(f"[initialize] expected log_dir as a path, got {got}")
    first_step = step_number("initialize", "init_training_step", settings.init_training_step)
    return _Source.of(settings.config_file), _directories(settings.feature_dirs), first_step


def _manager(
    settings: Settings,
    source: _Source,
    session: _engine.Session,
    calls: Calls,
    config: _engine.LoadedConfig,
) -> DebugManager:
    """Make the manager of the session, and log the settings of the session."""
    log_dir, files = settings.absolute_log_dir, settings.statistics_files
    manager = DebugManager(session, calls, config, log_dir, files)
    for message in [*_add_loggers(settings, session), source.message]:
        if message:
            manager.log_message(message)
    if source.message:
        manager.log_message(f"Loaded configs for dict_keys({config.names!r}).")
    for warning in config.warnings:
        manager.log_message(warning, level=logging.WARNING)
    return manager


def _directories(feature_dirs: Any) -> list[str]:
    if feature_dirs is None or feature_dirs == "":
        return []
    one = isinstance(feature_dirs, (str, os.PathLike))
    if not one and not isinstance(feature_dirs, (list, tuple)):
        got = type(feature_dirs).__name__
        raise ValueError(f"[initialize] expected feature_dirs as a path or a list, got {got}")
    paths = [feature_dirs] if one else feature_dirs
    for path in paths:
        if not Path(path).is_dir():
            raise MissingFileError(
                f"[initialize] expected a directory in feature_dirs, got {path}; "
                "built-in features need no feature_dirs"
            )
    return [str(path) for path in paths]


def _load(source: _Source, missing: list[tuple[str, str]]) -> _engine.LoadedConfig:
    config = engine().load(source.content, source.origin)
    if config.errors:
        said = [pointed(error, source.content) for error in config.errors]
        lines = [*said, *(f"{name} is not loaded: {reason}" for name, reason in missing)]
        raise ValueError("[config] " + "\n".join(lines))
    return config


def _log_options(settings: Settings) -> _engine.LogOptions:
    overwrite = _env.log_overwrite()
    return _engine.LogOptions(
        directory=settings.absolute_log_dir,
        statistics=settings.statistics_files,
        rank=get_distributed_rank(),
        stamp=_env.log_stamp(),
        append_text=overwrite is False,
        append_rows=overwrite is not True,
        timestamps=settings.log_timestamps,
        level=_env.log_level(),
    )


def _add_loggers(settings: Settings, session: _engine.Session) -> list[str]:
    """Fill `MetricLogger.enabled_loggers`; return messages about them for the debug log."""
    loggers = MetricLogger.enabled_loggers
    loggers.clear()
    messages = []
    if settings.statistics_logger is not None:
        loggers.append(settings.statistics_logger)
        messages.append("Using the provided logger for logging tensor statistics.")
    if settings.tb_writer is not None:
        loggers.append(TensorboardLogger(settings.tb_writer))
        messages.append("TB Writer found. Logging to Tensorboard..")
    if settings.statistics_files:
        loggers.append(StatisticsFiles(session))
        messages.append(f"Default logging to file enabled at {settings.log_dir}")
    return messages
