"""The public functions of the precision debugger.

A program calls `initialize` once, `step` after each backward pass, and `end_debug` at the end. In
between, the features that the configuration selects look at tensors of layers, or replace them. A
process has at most one session, which is `DEBUG_MANAGER`.

Example:
    >>> import tempfile
    >>> import nvdlfw_inspect.api as debug_api
    >>> debug_api.initialize(log_dir=tempfile.mkdtemp())
    >>> debug_api.step()
    >>> debug_api.end_debug()
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Collection
from typing import Any

from nvdlfw_inspect.debug_manager import DebugManager
from nvdlfw_inspect.exits import ExitHooks
from nvdlfw_inspect.layer_names import assign_layer_names
from nvdlfw_inspect.logging import BaseLogger, print_rank_0
from nvdlfw_inspect.namespaces import find_namespace
from nvdlfw_inspect.registry import Registry, import_built_in
from nvdlfw_inspect.report.extras import MissingExtraError
from nvdlfw_inspect.report.records import LogError
from nvdlfw_inspect.startup import Settings, check, start
from nvdlfw_inspect.utils import (
    in_notebook,
    process_group,
    refuse_misspelt,
    step_number,
    warn_user,
)

DEBUG_MANAGER: DebugManager | None = None
_steering = threading.RLock()  # one thread at a time begins, steps or ends a session


def _forked() -> None:
    """Called in forked children: the thread that holds the lock may not exist there."""
    global _steering  # noqa: PLW0603 - whoever forks while it holds the lock releases the old one
    _steering = threading.RLock()


os.register_at_fork(after_in_child=_forked)

_PATIENCE = 10.0  # seconds to wait at exit for a thread that holds the lock
_OPTIONS = {"tb_writer", "default_logging_enabled", "log_timestamps"}
_Path = str | os.PathLike[str]


def initialize(
    config_file: _Path | dict[str, Any] | None = "",
    feature_dirs: _Path | list[_Path] | None = None,
    statistics_logger: BaseLogger | None = None,
    log_dir: _Path = ".",
    init_training_step: int = 0,
    **kwargs: Any,
) -> None:
    """Start a debug session. Call it on every rank, before or after building the model.

    Args:
        config_file: A YAML file that selects layers and features, or its content as a dict. With
            None or "", no feature runs.
        feature_dirs: Directories with feature classes of your own; all their *.py files are run.
            Built-in features need no directory.
        statistics_logger: Receives all statistics.
        log_dir: Where the log files go.
        init_training_step: The first iteration.
        kwargs: `tb_writer`: a TensorBoard `SummaryWriter` that receives all statistics;
            `default_logging_enabled`: write statistics to files even if there is a `tb_writer` or
            a `statistics_logger`, False by default (without either of them, statistics always go to
            files; the debug log is always written); `log_timestamps`: begin the lines of the text
            logs with the time, True by default.

    Raises:
        ValueError: A session is running already (in a notebook it is replaced), the configuration
            has errors, the log directory cannot be written, or `init_training_step` is negative.
        TypeError: An argument has the wrong type or a misspelt name. Other unknown arguments cause
            a warning.
        RuntimeError: A feature cannot be created.

    A call that raises starts no session and changes nothing else, except in notebooks, where a new
    session replaces the running one: the running session continues after a wrong argument and, if
    there are no `feature_dirs`, after a mistake in the configuration; after other errors it has
    ended.

    Environment variables:

    - NVDLFW_INSPECT_LOG_LEVEL: messages below this level are not written (default INFO).
    - NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE: 0 appends to the log files of an earlier session, 1
      truncates them. By default, text logs start anew and JSON lines are appended.
    - NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP: 1 adds a stamp to the names of the text logs, which is
      NVDLFW_INSPECT_LOG_TIMESTAMP or, if that is not set, the time.
    """
    unknown = sorted(set(kwargs) - _OPTIONS)
    known = [*list(inspect.signature(initialize).parameters)[:-1], *sorted(_OPTIONS)]
    refuse_misspelt("initialize", unknown, known)
    for name in unknown:
        near = [whole for whole in known if whole.endswith(f"_{name}")]
        near += difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        warn_user(f"[initialize] argument {name} is not known{hint}")
    options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
    settings = Settings(
        config_file, feature_dirs, statistics_logger, log_dir, init_training_step, **options
    )
    with _steering:
        _begin(settings)


def _begin(settings: Settings) -> None:
    global DEBUG_MANAGER  # noqa: PLW0603 - clients read it here
    if DEBUG_MANAGER is not None:
        if not in_notebook():
            raise ValueError(
                "[initialize] expected no running session, got one: call end_debug() first"
            )
        check(settings)
        print_rank_0("A debug session was running: it ends, a new one begins.")
        _end()
    DEBUG_MANAGER = start(settings)
    try:
        DEBUG_MANAGER.begin()
    except BaseException:
        _end()
        raise
    _hooks.install()


def end_debug() -> None:
    """End the session and close its logs. Without a session, do nothing."""
    with _steering:
        _end()


def _end() -> None:
    global DEBUG_MANAGER  # noqa: PLW0603 - clients read it here
    manager = DEBUG_MANAGER
    if manager is None:
        return
    try:
        manager.end()
    finally:
        DEBUG_MANAGER = None
        _hooks.remove()


def step() -> None:
    """End an iteration: call it after each backward pass. Without a session, do nothing.

    A backward that runs after it belongs to the next iteration: features see its gradients under
    that number, and only if they are due in the iterations of both the forward and the backward.
    """
    with _steering:
        if DEBUG_MANAGER is not None:
            DEBUG_MANAGER.step()


def initialize_training_step(train_step: int) -> None:
    """Set the number of the current iteration. Without a session, do nothing.

    Statistics that were taken under another number since the last `step()` are discarded.

    Args:
        train_step: The number, from 0. A resumed training passes the step at which it continues.

    Raises:
        TypeError: `train_step` is no integer.
        ValueError: `train_step` is negative, or 2^40 or more.
    """
    with _steering:
        if DEBUG_MANAGER is not None:
            number = step_number("initialize_training_step", "train_step", train_step)
            DEBUG_MANAGER.iteration = number


def flush() -> None:
    """Wait for pending statistics and write them to the logs. Without a session, do nothing."""
    if DEBUG_MANAGER is not None:
        DEBUG_MANAGER.flush()


def show(log_dir: _Path | None = None) -> None:
    """Show a summary of the statistics, in a notebook as a table.

    If there is nothing to show, it prints why and raises nothing, so that training goes on.

    Args:
        log_dir: Directory of the logs; by default that of the running session.
    """
    flush()
    manager, directory = DEBUG_MANAGER, log_dir
    if directory is None and manager is not None:
        directory = manager.log_dir if manager.statistics_files else None
    if directory is None:
        none = "no session is running, call initialize() first"
        no_files = "the session writes no statistics to files, see default_logging_enabled"
        print_rank_0(f"[show] nothing to show: {none if manager is None else no_files}")
        return
    try:
        importlib.import_module("nvdlfw_inspect.report").show(directory)
    except (LogError, MissingExtraError, OSError) as error:
        why = manager.why_nothing_is_logged() if log_dir is None and manager else [str(error)]
        print_rank_0("\n  ".join(["[show] nothing to show:", *why]))


def log_message(
    msg: str,
    layer_name: str | None = None,
    level: int = logging.INFO,
    extra_cachable_args: Any = None,
) -> None:
    """Write a line to the debug log, prefixed by the layer's name; equal lines are written once.

    Args:
        msg: The text.
        layer_name: The layer that it is about.
        level: As in `logging`.
        extra_cachable_args: Further values that tell lines apart: a line is written again if they
            differ.

    Raises:
        RuntimeError: No session is running.
    """
    once = (msg, layer_name, level, extra_cachable_args)
    _manager("log_message").log_message(msg, layer_name, level, once)


def list_features() -> None:
    """Print the names of all features, on the first rank.

    Without a session: the built-in features, and the feature classes that are registered.
    """
    print_rank_0(list(_features()))


def explain_features(features: str | list[str] | None = None) -> None:
    """Print the docstrings of features, on the first rank; None for a class without one.

    Args:
        features: A name such as "LogTensorStats" or "transformer_engine.LogTensorStats", a list of
            names, or "all".

    Raises:
        TypeError: `features` is something else.
    """
    known = _features()
    if features is None:
        print_rank_0('No feature provided. Please name some, or say "all".')
        return
    chosen = list(known) if features == "all" else features
    chosen = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(chosen, Collection) or not all(isinstance(name, str) for name in chosen):
        raise TypeError(
            f"[explain_features] expected the name of a feature, a list of names, or 'all', got"
            f" {features!r}"
        )
    for name in chosen:
        found = [one for one in known if name in (one, one.rpartition(".")[2])]
        if not found:
            near = difflib.get_close_matches(name, [n.rpartition(".")[2] for n in known], 1)
            hint = f"; did you mean {near[0]}?" if near else f". There are: {list(known)}"
            print_rank_0(f"feature: {name} is not supported in this tool{hint}")
        for one in found:
            print_rank_0("-----")
            print_rank_0(f"feature: {one}")
            own = known[one].__doc__  # `inspect.getdoc` would take that of a base class
            print_rank_0(own if own is None else inspect.cleandoc(own))
            print_rank_0("*****")


def _features() -> dict[str, type]:
    """The feature classes by full name, without classes for tests, which begin with `_`."""
    import_built_in()
    classes = Registry.classes()
    return {name: cls for name, cls in classes.items() if not cls.__name__.startswith("_")}


def infer_and_assign_layer_names(model: Any) -> None:
    """Name the layers of a model by their place in it, such as "model.decoder.0.fc1".

    Modules of other libraries keep a `name` that cannot be set: a property, or a child module.

    Args:
        model: A `torch.nn.Module`, a wrapper that has it as `module`, or a list of these.

    Raises:
        RuntimeError: No session is running.
        ValueError: `model` is something else.
    """
    assign_layer_names(model, _manager("infer_and_assign_layer_names").layer_named)


def set_tensor_reduction_group(group: Any, layer_name: str | None = None) -> None:
    """Set the process group over which statistics are reduced, instead of all ranks.

    All ranks of the group must run the same layers, such as the ranks of one pipeline stage, and
    each must set the group before `step()`. PerTensorScaling and FakeQuant then also scale
    activations and gradients by the amax over the group.

    Args:
        group: A `torch.distributed` group of this rank, or a DeviceMesh of one dimension; None: all
            ranks.
        layer_name: Ignored: there is one group for all layers.

    Raises:
        ValueError: No session is running, or this rank is not in the group.
        TypeError: `group` is not a process group.

    Example:
        >>> import tempfile
        >>> import nvdlfw_inspect.api as debug_api
        >>> debug_api.initialize(log_dir=tempfile.mkdtemp())
        >>> debug_api.set_tensor_reduction_group(None)  # in a pipeline: the group of the stage
        >>> debug_api.end_debug()
    """
    manager = _manager("set_tensor_reduction_group", ValueError)
    manager._tensor_reduction_group = process_group("set_tensor_reduction_group", group)
    manager.log_message(
        "Statistics of all layers are reduced over the group that was set.",
        once="set_tensor_reduction_group",
    )


def get_tensor_reduction_group() -> Any:
    """Return the group over which statistics are reduced; None: all ranks.

    Raises:
        ValueError: No session is running.
    """
    return _manager("get_tensor_reduction_group", ValueError)._tensor_reduction_group


def __getattr__(name: str) -> Any:
    """Return a namespace, such as `api.transformer_engine`, or a call of the namespace `base`."""
    if name.startswith("__"):
        raise AttributeError(name)
    _manager(name)
    found = find_namespace(name)
    if found is None:
        known = ", ".join(Registry.data)
        raise ValueError(f"[api] expected one of the namespaces {known}, got {name}")
    return found


def _manager(op: str, error: type[Exception] = RuntimeError) -> DebugManager:
    if DEBUG_MANAGER is None:
        raise error(f"[{op}] expected a running session, got none: call initialize() first")
    return DEBUG_MANAGER


def _end_at_exit() -> None:
    """End the session, even if another thread has begun to end it and never returned."""
    steering = _steering
    alone = steering.acquire(timeout=_PATIENCE)
    try:
        _end()
    finally:
        if alone:
            steering.release()


_hooks = ExitHooks(_end_at_exit, flush)
