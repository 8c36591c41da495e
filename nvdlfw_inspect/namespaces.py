"""`nvdlfw_inspect.api.<namespace>`, by which programs call features as layers do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nvdlfw_inspect.debug_manager import DebugManager
from nvdlfw_inspect.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable


class Answer(NamedTuple):
    """The result of a routing call (`*_enabled`); its truth value is that of `yes`.

    Attributes:
        yes: The answer, for the iteration of the call.
        next_iteration: The next iteration at which a feature is asked again; None: never.

    >>> bool(Answer(False, 3)), Answer(False, 3) == (False, 3)
    (False, True)
    """

    yes: bool
    next_iteration: int | None

    def __bool__(self) -> bool:
        return self.yes


class Namespace:
    """The calls of a namespace, as functions of `layer_name` and further arguments."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, api_name: str) -> Callable[..., Any]:
        if api_name.startswith("_"):
            raise AttributeError(api_name)
        return partial(self.route_api, api_name=api_name)

    def route_api(self, layer_name: str, api_name: str, **kwargs: Any) -> Any:
        """Call a method of the features of a layer.

        Returns:
            For a routing call (`*_enabled`): an `Answer`, a tuple `(yes, next_iteration)`. For
            other calls: the result of the feature. If no feature was called, {} in the namespace
            `base`, and None in others.

        Raises:
            RuntimeError: No session is running.
        """
        manager = DebugManager.running
        if manager is None:
            raise RuntimeError("[inspect] expected a session: call debug_api.initialize() first")
        if api_name.endswith("_enabled"):
            carried = {k: kwargs.get(k) for k in ("tensor_name", "gemm", "iteration")}
            return Answer(*manager.decide(self._name, api_name, layer_name=layer_name, **carried))
        result = manager.call(self._name, api_name, layer_name=layer_name, **kwargs)
        return {} if result is None and self._name == "base" else result

    def step(self) -> None:
        """Called when an iteration ends: nothing to do."""

    def end_debug(self) -> None:
        """Called when the session ends: nothing to do."""


def find_namespace(name: str) -> Any:
    """Return a call of `base`, a namespace, or None for an unknown name."""
    base = Registry.data.get("base")
    if base is not None and base.feat_api_to_features.get(name):
        return partial(find_namespace("base").route_api, api_name=name)
    data = Registry.data.get(name)
    if data is None:
        return None
    return data.api if data.api is not None else Namespace(name)
