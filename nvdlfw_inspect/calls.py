"""`Calls`: calls the methods of features for the engine, and adds context to their errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from nvdlfw_inspect.utils import warn_user

if TYPE_CHECKING:
    from nvdlfw_inspect._engine import Schedule

# Documented arguments that some calls lack: a method that requires such an argument then gets None.
_OPTIONAL = {
    "tensor_name",
    "gemm",
    "tensor",
    "default_quantizer",
    "out",
    "dtype",
    "tp_group",
    "tp_size",
    "rowwise",
    "rowwise_quantized_tensor",
    "columnwise_quantized_tensor",
    "quantizer",
    "is_evaluation",
}
_KINDS = (NotImplementedError, ValueError, TypeError)


@dataclass(frozen=True, eq=False)
class Routed:
    """One feature of one section that acts on a tensor and gemm.

    Attributes:
        feature: The instance of the feature class.
        name: Canonical name of the feature, even if the configuration uses an alias.
        section: Name of the section of the configuration.
        config: Configuration of the feature for the tensor and gemm, as plain values.
        schedule: When the feature is due; None if its class declares no schedule.
    """

    feature: Any
    name: str
    section: str
    config: dict[str, Any]
    schedule: Schedule | None


def _parameters_of(method: Callable[..., Any]) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Return the arguments that a method takes (None: all), and those to fill in with None."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # no signature: pass everything
        return None, ()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = tuple(p.name for p in required if p.name in _OPTIONAL)
    return None if takes_all else frozenset(p.name for p in parameters), missing


class Calls:
    """Calls features for a session. The engine calls `load`, `parse` and `ask`.

    Args:
        load: runs a feature file and returns an error message, or None.
    """

    def __init__(self, load: Callable[[str], str | None]) -> None:
        self.load = load
        self.instances: dict[int, Any] = {}
        self._parameters: dict[tuple[type, str], tuple[frozenset[str] | None, tuple[str, ...]]] = {}

    def routed(
        self, id: int, name: str, section: str, config: dict[str, Any], schedule: Schedule | None
    ) -> Routed:
        """Make a `Routed`."""
        return Routed(self.instances[id], name, section, config, schedule)

    def parse(
        self,
        id: int,
        written: dict[str, Any],
        api: str,
        layer: str,
        tensor: str | None,
        gemm: str | None,
    ) -> dict[str, Any] | None:
        """Let a feature parse its own configuration."""
        feature = self.instances[id]
        target = {"tensor_name": tensor, "gemm": gemm}
        parsing = {"tensor_parsing": tensor is not None, "gemm_parsing": gemm is not None}
        routed = Routed(feature, type(feature).__name__, "", {"enabled": True, **written}, None)
        arguments = {"layer_name": layer, **target, **parsing}
        answer = self.invoke(routed, "parse_config_and_api", arguments)
        try:
            covered, config = answer
            if not covered:
                return None
            return written if config is None else dict(config)
        except Exception as error:  # also one that a user's type raises
            place = describe(routed, layer, tensor, gemm)
            raise TypeError(
                f"[parse_config_and_api] expected (acts, config), got {answer!r} ({place})"
            ) from error

    def ask(
        self,
        routed: Routed,
        api: str,
        layer: str,
        tensor: str | None,
        gemm: str | None,
        iteration: int,
    ) -> tuple[bool, int | None]:
        """Make a routing call; a plain bool is valid for this iteration alone."""
        target = {"tensor_name": tensor, "gemm": gemm}
        arguments: dict[str, Any] = {k: v for k, v in target.items() if v is not None}
        arguments |= {"layer_name": layer, "iteration": iteration}
        answer = self.invoke(routed, api, arguments)
        try:
            return _decision(answer, iteration)
        except Exception as error:  # also one that a user's type raises
            place = describe(routed, layer, tensor, gemm, iteration)
            raise TypeError(
                f"[{api}] expected bool or (bool, next iteration), got {answer!r} ({place})"
            ) from error

    def invoke(self, routed: Routed, api: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of a feature with those of the arguments that it takes.

        Raises:
            NotImplementedError, ValueError, TypeError, RuntimeError: The feature raised an error of
                this class. Other errors become a RuntimeError. The text names feature, layer,
                tensor, gemm and iteration.
        """
        method = getattr(routed.feature, api)
        key = (type(routed.feature), api)
        if key not in self._parameters:
            self._parameters[key] = _parameters_of(method)
        taken, missing = self._parameters[key]
        offered = {**dict.fromkeys(missing), "config": dict(routed.config), **arguments}
        chosen = {k: v for k, v in offered.items() if taken is None or k in taken}
        try:
            return method(**chosen)
        except Exception as error:
            kind = next((k for k in _KINDS if isinstance(error, k)), RuntimeError)
            names = ("layer_name", "tensor_name", "gemm", "iteration")
            place = describe(routed, *(arguments.get(name) for name in names))
            said = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
            raise kind(f"[{api}] {said} ({place})") from error

    def warn(self, text: str) -> None:
        """Warn the user's program."""
        warn_user(text)

    def print(self, line: str) -> None:
        """Print a line."""
        print(line, file=sys.stderr, flush=True)


def _decision(answer: Any, iteration: int) -> tuple[bool, int | None]:
    """Split the answer of a routing call; raise an error of any class if it is malformed."""
    if not isinstance(answer, tuple):
        if answer is None or isinstance(answer, (str, bytes, list)):
            raise TypeError("no bool")
        return bool(answer), iteration + 1
    yes, later = answer
    if later is not None and index(later).bit_length() > 63:
        raise OverflowError("the next iteration has more than 64 bits")
    return bool(yes), None if later is None else index(later)


def describe(
    routed: Routed,
    layer: str | None = None,
    tensor: str | None = None,
    gemm: str | None = None,
    iteration: int | None = None,
) -> str:
    """Return a text that names the feature, and the layer, tensor, gemm and iteration of a call."""
    parts = {"layer": layer, "tensor": tensor, "gemm": gemm, "iteration": iteration}
    named = [f"{name} {value}" for name, value in parts.items() if value is not None]
    return ", ".join([f"feature {routed.name}", *named])
