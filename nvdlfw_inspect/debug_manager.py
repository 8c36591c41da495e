"""`DebugManager`: a running session, used by layers, features and `nvdlfw_inspect.api`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nvdlfw_inspect.logging import FileLogger, MetricLogger
from nvdlfw_inspect.registry import Registry
from nvdlfw_inspect.silence import Silence
from nvdlfw_inspect.utils import printable

if TYPE_CHECKING:
    from nvdlfw_inspect._engine import LoadedConfig, Schedule, Session
    from nvdlfw_inspect.calls import Calls, Routed


class Listener(Protocol):
    """An object that is told when sessions begin, step and end. It need not define `moved`."""

    def initialized(self, manager: DebugManager) -> None:
        """A session has begun; `api.DEBUG_MANAGER` is the manager."""

    def stepped(self, manager: DebugManager) -> None:
        """`step()` was called; `manager.iteration` has grown already."""

    def moved(self, manager: DebugManager) -> None:
        """`manager.iteration` was set by hand."""

    def ended(self, manager: DebugManager) -> None:
        """The session ends; the manager still logs."""


_listeners: list[Listener] = []


def subscribe(listener: Listener) -> None:
    """Add a listener of all sessions, including the running one.

    Listeners stay subscribed after `end_debug()`. Their errors are raised by the call that begins,
    steps or ends the session.
    """
    _listeners.append(listener)
    if DebugManager.running is not None:
        listener.initialized(DebugManager.running)


def unsubscribe(listener: Listener) -> None:
    """Undo `subscribe`."""
    _listeners.remove(listener)


class DebugManager:
    """One session, from `nvdlfw_inspect.api.initialize()` to `end_debug()`.

    Attributes:
        drain: Callables that wait for pending statistics and log them. They run before the logs
            are closed or shown.
        log_dir: The directory for everything that a session writes.
        statistics_files: Whether statistics are written to files in `log_dir`.
        config_names: Names of the sections of the configuration.
        config_hash: Hash of the configuration. Ranks compare it before they reduce statistics.
        layer_names: Names given to layers, whether or not the layers have run.
        silence: Collects the reasons for which nothing was logged.
    """

    running: ClassVar[DebugManager | None] = None

    def __init__(
        self,
        session: Session,
        calls: Calls,
        config: LoadedConfig,
        log_dir: str,
        statistics_files: bool,
    ) -> None:
        self.drain: list[Callable[[], None]] = []
        self.log_dir = log_dir
        self.statistics_files = statistics_files
        self.config_names = config.names
        self.config_hash = config.hash
        self.layer_names: set[str] = set()
        self.silence = Silence(config)
        self._config = config
        self._session = session
        self._calls = calls
        self._tensor_reduction_group: Any = None
        self._draining: set[int] = set()  # threads that are in `flush`

    @property
    def epoch(self) -> int:
        """The number of the session: unique in the process, and larger for each later session."""
        return self._session.epoch

    @property
    def has_features(self) -> bool:
        """Whether the configuration enables a feature for any layer."""
        return bool(self._config.plans([]))

    @property
    def iteration(self) -> int:
        """The current iteration: grows by one with each `step()`, and may be set."""
        return self._session.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._session.iteration = value
        with ExitStack() as rest:
            for listener in reversed(_listeners):
                if hasattr(listener, "moved"):
                    rest.callback(listener.moved, self)

    _trainer_iteration_count = iteration

    def route(
        self,
        namespace: str,
        layer_name: str,
        api_name: str,
        tensor_name: str | None = None,
        gemm: str | None = None,
    ) -> tuple[Routed, ...]:
        """Return the features that act on a tensor and gemm, in the order of the configuration.

        Raises:
            ValueError: Two sections select the same feature, or features that exclude each other.
        """
        return self._session.route(namespace, api_name, layer_name, tensor_name, gemm)

    def decide(
        self,
        namespace: str,
        api_name: str,
        *,
        layer_name: str,
        tensor_name: str | None = None,
        gemm: str | None = None,
        iteration: int | None = None,
    ) -> tuple[bool, int | None]:
        """Make a routing call (`*_enabled`).

        Returns:
            The merged answer of all features, and the next iteration at which a feature is asked
            again (None: never). True is valid for this iteration alone.
        """
        now = self.iteration if iteration is None else iteration
        return self._session.decide(now, namespace, api_name, layer_name, tensor_name, gemm)

    def active(
        self, iteration: int, namespace: str, api_name: str, layer: str, *target: str | None
    ) -> tuple[Routed, ...]:
        """Return the features whose routing call for a method returned True for the iteration.

        `target` is the name of the tensor and the gemm.
        """
        return self._session.active(iteration, namespace, api_name, layer, *target)

    def call(
        self,
        namespace: str,
        api_name: str,
        *,
        layer_name: str,
        skip: Callable[[Any], bool] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method of the features whose routing call returned True for this iteration.

        Each feature gets the arguments in `kwargs` that its method takes. Features for which `skip`
        returns True are not called.

        Returns:
            The result of the last feature that was called; None if there was none.

        Raises:
            NotImplementedError: `modify_tensor` was called, and no feature modifies the tensor.
            RuntimeError: Several features modify the tensor.
        """
        iteration = kwargs.get("iteration")
        now = self.iteration if iteration is None else iteration
        tensor, gemm = kwargs.get("tensor_name"), kwargs.get("gemm")
        uses = self.active(now, namespace, api_name, layer_name, tensor, gemm)
        if not uses and api_name == "modify_tensor":
            raise NotImplementedError(
                f"[modify_tensor] expected a feature that modifies the tensor, got none (layer "
                f"{layer_name}, tensor {tensor}, gemm {gemm}, iteration {now})"
            )
        arguments = {**kwargs, "layer_name": layer_name, "iteration": now}
        result = None
        for use in uses:
            if skip is not None and skip(use.feature):
                continue
            result = self._calls.invoke(use, api_name, arguments)
            if api_name.startswith("inspect_") and result is not None:
                raise TypeError(
                    f"[{api_name}] expected feature {use.name} to return None, got "
                    f"{type(result).__name__} (layer {layer_name}, tensor {tensor})"
                )
        return result

    def log_statistics(
        self, iteration: int, layer: str, tensor: str, values: Mapping[str, float | None]
    ) -> None:
        """Log statistics of a tensor, on the calling thread.

        A value of None (an empty tensor) appears in the JSON lines only.
        """
        MetricLogger.log_statistics(iteration, layer, tensor, values)

    def log_message(
        self, text: str, layer: str | None = None, level: int = logging.INFO, once: Any = None
    ) -> None:
        """Write to the debug log; once per session for each value of `once` that is not None."""
        key = None if once is None else repr(once)
        self._session.log_message(level, printable(text), printable(layer or ""), key)

    def layer_named(self, name: str) -> None:
        """Called when a layer of the model gets a name."""
        self.layer_names.add(name)
        self.log_message(f"Assigned layer name: {name}")

    def layer_config(self, layer_name: str) -> dict[str, dict[str, Any]]:
        """Return {namespace: {feature: configuration}} as written for a layer."""
        return self._session.written(layer_name)

    def schedules(self, feature: str) -> list[tuple[str, Schedule]]:
        """Return (tensor, schedule) pairs of a feature, over all layers.

        They follow from the configuration alone, so they are the same on all ranks.
        """
        return [
            (tensor, schedule)
            for _, name, _, targets in self._config.plans([])
            if name == feature
            for _, tensor, schedule in targets
        ]

    def step(self) -> None:
        """End an iteration: count, tell the listeners, write the logs."""
        self.silence.over(self.iteration)
        self._session.advance()
        with ExitStack() as rest:  # runs in reverse order; each runs even if another raises
            rest.callback(self._session.settle)
            for api in Registry.namespace_apis():
                rest.callback(api.step)
            for listener in reversed(_listeners):
                rest.callback(listener.stepped, self)

    def why_nothing_is_logged(self) -> list[str]:
        """Return sentences that say why the logs are empty."""
        return self.silence.reasons(self._session.layers())

    def begin(self) -> None:
        """Begin the session, and tell the listeners."""
        self._run(self, FileLogger(self.log_dir, self._session))
        for listener in list(_listeners):
            listener.initialized(self)

    @staticmethod
    def _run(manager: DebugManager | None, log: FileLogger | None) -> None:
        DebugManager.running, FileLogger.running = manager, log

    def flush(self) -> None:
        """Wait for pending statistics, and write everything to the log files."""
        thread = threading.get_ident()
        if thread in self._draining:  # called by a signal handler that interrupted `flush`
            return
        self._draining.add(thread)
        try:
            with ExitStack() as rest:
                rest.callback(self._session.flush)
                for wait in reversed(self.drain):
                    rest.callback(wait)
        finally:
            self._draining.discard(thread)

    def end(self) -> None:
        """End the session: drain, tell the listeners, write the logs, drop the features."""
        with ExitStack() as rest:
            rest.callback(self._run, None, None)
            rest.callback(self._session.release)
            rest.callback(Registry.reset)
            rest.callback(MetricLogger.enabled_loggers.clear)
            rest.callback(self._session.finish)
            for api in Registry.namespace_apis():
                rest.callback(api.end_debug)
            for listener in reversed(_listeners):
                rest.callback(listener.ended, self)
            rest.callback(self.flush)
            if self._session.layers():  # without a step, sections that select none are not told yet
                rest.callback(self._session.settle)
            for text in self.silence.never_due():
                self.log_message(f"[config] {text}", level=logging.WARNING)
