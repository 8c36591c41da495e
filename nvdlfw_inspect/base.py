"""What feature classes use: the description of their configuration, and base classes.

The engine in C++ checks a configuration against the `FeatureConfig` of each feature when it loads
the file. So a mistake is reported with its line before training begins, and the methods of a
feature get values that are valid.
"""

# ruff: noqa: B027 - what follows may be overridden

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvdlfw_inspect.registry import NamespaceData


@dataclass(frozen=True)
class Key:
    """One key of a feature's configuration.

    Attributes:
        kind: "bool", "int", "number", "string" or "any".
        required: Whether a configuration without it is an error.
        at_least: The smallest valid "int"; None: no limit.
        at_most: The largest valid "int"; None: no limit.
    """

    kind: str
    required: bool = False
    at_least: int | None = None
    at_most: int | None = None


@dataclass(frozen=True, init=False)
class Choice:
    """A key whose value is one of several words, in upper or lower case.

    Example:
        >>> Choice("FP8E4M3", "FP8E5M2", required=True).values
        ('FP8E4M3', 'FP8E5M2')
    """

    values: tuple[str, ...]
    required: bool

    def __init__(self, *values: str, required: bool = False) -> None:
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "required", required)


@dataclass(frozen=True)
class FeatureConfig:
    """Describes the configuration of a feature class, as its class attribute `CONFIG`.

    The engine checks the configuration of the feature against this description, and passes to the
    methods of the feature the entries for one tensor and gemm. A class without `CONFIG` takes any
    keys.

    Attributes:
        keys: The kind of each key: "bool", "int", "number", "string", "any", a `Key` or a `Choice`.
            None: any keys.
        statistics: Regular expressions for the entries of `stats`; empty: there is no `stats`.
        statistic_keys: For each statistic that may be written as a mapping,
            `{name: {key: value}}`: the kinds of its keys.
        tensors: Names of the tensors that the feature can act on; empty: its configuration names
            no tensors. None: any names, which the program that calls the feature chooses.
        gemms: Whether the configuration has `gemms` or `gemms_struct`.
        scheduled: Whether the configuration may have `freq`, `start_step`, `end_step` and
            `start_end_list`.
        aliases: Other names of the feature.
        conflicts: Features that must not act on the same tensor and gemm.
        any_case: Whether `stats` may name statistics in upper case, too.

    Example:
        >>> FeatureConfig(keys={"margin": "int"}, tensors=("weight",), gemms=True).gemms
        True
    """

    keys: Mapping[str, str | Key | Choice] | None = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    statistic_keys: Mapping[str, Mapping[str, str | Key | Choice]] = field(default_factory=dict)
    tensors: tuple[str, ...] | None = ()
    gemms: bool = False
    scheduled: bool = False
    aliases: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    any_case: bool = False

    def rule(self) -> dict[str, Any]:
        """Return the form that the engine takes."""
        return {
            "free_form": self.keys is None,
            "keys": _key_rules(self.keys or {}),
            "statistics": list(self.statistics),
            "any_case": self.any_case,
            "statistic_keys": {s: _key_rules(keys) for s, keys in self.statistic_keys.items()},
            "tensors": list(self.tensors or ()),
            "any_tensors": self.tensors is None,
            "gemms": self.gemms,
            "scheduled": self.scheduled,
            "aliases": list(self.aliases),
            "conflicts": list(self.conflicts),
        }


def _key_rules(keys: Mapping[str, str | Key | Choice]) -> list[tuple[Any, ...]]:
    return [(name, *_key_rule(key)) for name, key in keys.items()]


def _key_rule(key: str | Key | Choice) -> tuple[Any, ...]:
    if isinstance(key, Choice):
        return "choice", list(key.values), key.required, None, None
    if isinstance(key, str):
        key = Key(key)
    return key.kind, [], key.required, key.at_least, key.at_most


def parsed_by_engine(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a `parse_config_and_api` that the engine need not call, because it does the same itself.

    If a class overrides the method without this mark, the engine calls the method.
    """
    method.parsed_by_engine = True  # type: ignore[attr-defined]
    return method


def choose_entry(config: Mapping[str, Any], what: str, name: Any) -> dict[str, Any] | None:
    """Return the configuration of one tensor or gemm; None if `config` does not name it.

    Args:
        config: Has a list `{what}s`, or a list `{what}s_struct` of dicts, whose keys override the
            outer ones.
        what: "tensor" or "gemm".
        name: The name of the tensor or gemm.

    Raises:
        ValueError: `config` has neither list.

    Example:
        >>> struct = [{"tensor": "weight", "freq": 2}]
        >>> choose_entry({"freq": 1, "tensors_struct": struct}, "tensor", "weight")
        {'freq': 2, 'tensor': 'weight'}
    """
    plain, struct = f"{what}s", f"{what}s_struct"
    outer = {key: value for key, value in config.items() if key not in (plain, struct)}
    if config.get(struct) is not None:
        return next(({**outer, **entry} for entry in config[struct] if entry[what] == name), None)
    if config.get(plain) is None:
        raise ValueError(
            f"[parse_config_and_api] expected {plain} or {struct} in the configuration, got "
            f"{sorted(config)}"
        )
    names = config[plain]
    return {**outer, what: name} if name in ([names] if isinstance(names, str) else names) else None


class BaseConfigAPIMapper(ABC):
    """Base of features that parse their own configuration."""

    def _process_tensor_config(
        self, config: Mapping[str, Any], api_tensor_name: str
    ) -> dict[str, Any] | None:
        """Return the configuration of a tensor, see `choose_entry`."""
        return choose_entry(config, "tensor", api_tensor_name)

    @abstractmethod
    def parse_config_and_api(
        self, config: dict[str, Any], **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a configuration covers a call, and return its entries for that call.

        Args:
            config: As written, including `enabled`.
            kwargs: `tensor_name` and `gemm`, if the call has them.

        Returns:
            Whether the feature acts, and the configuration that its methods get.
        """


class BaseNamespaceAPI(ABC):
    """Base of classes that route the calls of a namespace which a program defines itself.

    Register one with `Registry.register_namespace_api`. The engine routes the calls of built-in
    namespaces.
    """

    name = ""
    _default_api_impl: Any = None  # has the methods that are called if no feature acts

    def __getattr__(self, api_name: str) -> Callable[..., Any]:
        if api_name.startswith("_"):
            raise AttributeError(api_name)
        return partial(self.route_api, api_name=api_name)

    @property
    def namespace_features(self) -> dict[str, Any]:
        """The features of the namespace by name, while a session runs."""
        return _data_of(self.name).features

    @property
    def api_to_features_map(self) -> dict[str, list[str]]:
        """For each call, the names of the features that define it."""
        return _data_of(self.name).feat_api_to_features

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        """Raise an error if arguments of a call are missing."""

    @abstractmethod
    def routing_condition(
        self,
        api_name: str,
        config: dict[str, Any],
        layer_name: str,
        feature_obj: Any,
        **kwargs: Any,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a feature acts, and the configuration that it gets (None: as written)."""

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        """Raise an error if the result of a feature is wrong."""

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        """Return whether several features may act in one call."""
        return False

    def handle_multi_feature_output(
        self,
        api_name: str,
        multi_feature_outputs: list[Any],
        features_to_invoke: dict[str, dict[str, Any]],
        **kwargs: Any,
    ) -> Any:
        """Merge the results of several features; by default they must be equal.

        Args:
            api_name: The call.
            multi_feature_outputs: The results, in the order of `features_to_invoke`.
            features_to_invoke: For the name of each feature, the configuration that it got.
            kwargs: The arguments of the call.
        """
        first, *others = multi_feature_outputs
        if any(other != first for other in others):
            raise RuntimeError(
                f"[{api_name}] expected features that agree, got {multi_feature_outputs}"
            )
        return first

    def call_feature(
        self, call: Callable[..., Any], feat_config: dict[str, Any], layer_name: str, **kwargs: Any
    ) -> Any:
        """Call a feature's method."""
        return call(feat_config, layer_name, **kwargs)

    def step(self) -> None:
        """Called when an iteration ends."""

    def end_debug(self) -> None:
        """Called when the session ends."""

    def route_api(self, layer_name: str, api_name: str, **kwargs: Any) -> Any:
        """Call a method of those features of a layer for which `routing_condition` returns True.

        Returns:
            Their result. If no feature acts: the result of `_default_api_impl`, or {} if that has
            no such method.

        Raises:
            RuntimeError: Several features act in a call that allows one.
        """
        self.input_assertions_hook(api_name, layer_name=layer_name, **kwargs)
        chosen = self._chosen(layer_name, api_name, kwargs)
        if len(chosen) > 1 and not self.is_multiple_feature_invocation_allowed(api_name):
            raise RuntimeError(
                f"[{api_name}] expected one feature, got {list(chosen)} (layer {layer_name})"
            )
        outputs = []
        for name, config in chosen.items():
            method = getattr(self.namespace_features[name], api_name)
            outputs.append(self.call_feature(method, config, layer_name, **kwargs))
            self.output_assertions_hook(api_name, outputs[-1], **kwargs)
        if len(outputs) > 1:
            return self.handle_multi_feature_output(api_name, outputs, chosen, **kwargs)
        default = getattr(self._default_api_impl, api_name, None)
        if not outputs and default is not None:
            return default({}, layer_name, **kwargs)
        return outputs[0] if outputs else {}

    def _chosen(
        self, layer_name: str, api_name: str, kwargs: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        from nvdlfw_inspect.config_manager import ConfigManager  # noqa: PLC0415 - it needs features

        chosen = {}
        written = ConfigManager.get_config_for_layer(layer_name).get(self.name, {})
        for name, config in written.items():
            if name in self.api_to_features_map.get(api_name, ()):
                feature = self.namespace_features[name]
                acts, own = self.routing_condition(api_name, config, layer_name, feature, **kwargs)
                if acts:
                    chosen[name] = config if own is None else own
        return chosen


def _data_of(namespace: str) -> NamespaceData:
    from nvdlfw_inspect.registry import Registry  # noqa: PLC0415 - it needs features

    return Registry.data[namespace]
