"""`Registry`: the feature classes of the process, by namespace."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from nvdlfw_inspect.engine import engine
from nvdlfw_inspect.feature_checks import slips_of
from nvdlfw_inspect.utils import warn_user

BUILT_IN = ("nvdlfw_inspect.debug_features.log_tensor_stats", "transformer_engine.debug.features")
"""Modules that define the built-in features; modules that cannot be imported are skipped."""

_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass
class NamespaceData:
    """The features of a namespace.

    Attributes:
        name: Name of the namespace.
        api: The object `nvdlfw_inspect.api.<name>`, if a class was registered for it.
        features: The instances by name, while a session runs.
        feat_api_to_features: For each call, the names of the features that define it.
    """

    name: str
    api: Any = None
    features: dict[str, Any] = field(default_factory=dict)
    feat_api_to_features: dict[str, list[str]] = field(default_factory=dict)

    @property
    def deferred_features(self) -> list[type]:
        """The classes without an instance: all classes, if no session runs."""
        of_namespace = [r.cls for r in Registry._classes.values() if r.namespace == self.name]
        return [cls for cls in of_namespace if type(self.features.get(cls.__name__)) is not cls]


@dataclass(frozen=True)
class _Registration:
    namespace: str
    cls: type
    origin: str
    module: ModuleType | None


class Registry:
    """The features of the process: decorators register classes, sessions instantiate them."""

    data: ClassVar[dict[str, NamespaceData]] = {}
    _classes: ClassVar[dict[int, _Registration]] = {}

    @staticmethod
    def register_feature(namespace: str) -> Callable[[_Class], _Class]:
        """Register the decorated class as a feature of a namespace.

        A class replaces an earlier one of the same name, so that a cell of a notebook can be run
        again. Built-in features cannot be replaced. Among feature files, the first class of a name
        stays.

        Example:
            >>> @Registry.register_feature(namespace="transformer_engine")
            ... class Nothing:
            ...     '''Does nothing.'''
        """

        def register(cls: _Class) -> _Class:
            _register(namespace, cls)
            return cls

        return register

    @staticmethod
    def register_namespace_api(namespace: str) -> Callable[[_Class], _Class]:
        """Register the decorated class; `nvdlfw_inspect.api.<namespace>` is its instance.

        Raises:
            TypeError: The class is no subclass of `BaseNamespaceAPI`, and lacks methods of it.
        """

        def register(cls: _Class) -> _Class:
            api = cls()
            if not all(hasattr(api, name) for name in ("route_api", "step", "end_debug")):
                raise TypeError(
                    f"[register_namespace_api] expected a subclass of BaseNamespaceAPI, got "
                    f"{cls.__name__} (namespace {namespace})"
                )
            api.name = namespace
            namespace_data(namespace).api = api
            return cls

        return register

    @staticmethod
    def namespace_apis() -> list[Any]:
        """Return the objects `nvdlfw_inspect.api.<namespace>` of registered classes."""
        return [data.api for data in Registry.data.values() if data.api is not None]

    @staticmethod
    def classes() -> dict[str, type]:
        """Return the classes of features, by `namespace.Name`."""
        named = sorted(
            (f"{r.namespace}.{r.cls.__name__}", r.cls) for r in Registry._classes.values()
        )
        return dict(named)

    @staticmethod
    def slips() -> list[str]:
        """Return messages about probable mistakes in feature classes."""
        slips = []
        for one in Registry._classes.values():
            calls = getattr(type(namespace_data(one.namespace).api), "documented_calls", ())
            slips += slips_of(one.cls, calls)
        return slips

    @staticmethod
    def instantiate() -> dict[int, Any]:
        """Create an instance of every class, for a new session."""
        instances: dict[int, Any] = {}
        for id, registration in Registry._classes.items():
            cls = registration.cls
            try:
                instances[id] = cls()
            except Exception as error:
                raise RuntimeError(
                    f"[initialize] feature {registration.namespace}.{cls.__name__} of "
                    f"{registration.origin or cls.__module__} cannot be created: "
                    f"{type(error).__name__}: {error}"
                ) from error
        for id, feature in instances.items():
            registration = Registry._classes[id]
            namespace_data(registration.namespace).features[registration.cls.__name__] = feature
        return instances

    @staticmethod
    def reset() -> None:
        """Drop all instances and the classes of feature files; classes of modules stay."""
        for id, registration in list(Registry._classes.items()):
            module = _module_of(registration.cls)
            if module is None or module is not registration.module:
                _forget(id)
        for data in Registry.data.values():
            data.features.clear()


def api_method(function: _Function) -> _Function:
    """Mark a method of a feature that layers, or `nvdlfw_inspect.api`, may call."""
    function.is_api = True  # type: ignore[attr-defined]
    return function


def namespace_data(name: str) -> NamespaceData:
    """Return the data of a namespace, which is created if it does not exist."""
    return Registry.data.setdefault(name, NamespaceData(name))


def import_built_in() -> list[tuple[str, str]]:
    """Import the modules of the built-in features; return (module, reason) for those that fail.

    The debugger also works without `transformer_engine`.
    """
    missing = []
    for name in BUILT_IN:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append((name, f"{type(error).__name__}: {error}"))
    return missing


def _module_of(cls: type) -> ModuleType | None:
    """Return what `sys.modules` has under the name of a class's module; None if nothing.

    Modules of feature files are removed from it after loading; another may then have their name.
    """
    return sys.modules.get(cls.__module__)


def origin_of(cls: type) -> str:
    """Return the file that defines a class; "" if there is none."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else ""


def _register(namespace: str, cls: type) -> None:
    name, origin = cls.__name__, origin_of(cls)
    data = namespace_data(namespace)
    for id, earlier in list(Registry._classes.items()):
        if earlier.namespace == namespace and earlier.cls.__name__ == name:
            if _stays(earlier, origin):
                return
            _forget(id)
    methods = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
    apis = {a for a, method in methods.items() if getattr(method, "is_api", False)}
    rule = {"namespace": namespace, "name": name, **_rule_of(cls)}
    id_ = engine().add(rule, apis, _parsing_of(cls), origin)
    if id_ is None:  # cannot be: an earlier class of this name was removed above
        raise RuntimeError(f"[register_feature] {namespace}.{name} is registered twice")
    Registry._classes[id_] = _Registration(namespace, cls, origin, _module_of(cls))
    for api in sorted(apis):
        data.feat_api_to_features.setdefault(api, []).append(name)


def _stays(earlier: _Registration, origin: str) -> bool:
    from nvdlfw_inspect.loading import loading_files  # noqa: PLC0415 - it needs this module

    built_in = earlier.cls.__module__.partition(".")[0] in ("transformer_engine", "nvdlfw_inspect")
    if not (built_in or loading_files()):
        return False
    if origin != earlier.origin or not built_in:
        taken = f"{earlier.namespace}.{earlier.cls.__name__}"
        warn_user(
            f"[register_feature] {taken} of {origin or 'this program'} is ignored: "
            f"{earlier.origin or 'this program'} has defined it before",
        )
    return True


def _forget(id: int) -> None:
    registration = Registry._classes.pop(id)
    engine().remove(id)
    data, name = namespace_data(registration.namespace), registration.cls.__name__
    for names in data.feat_api_to_features.values():
        if name in names:
            names.remove(name)


def _rule_of(cls: type) -> dict[str, Any]:
    config = getattr(cls, "CONFIG", None)
    return config.rule() if config is not None else {}


def _parsing_of(cls: type) -> str:
    if getattr(cls, "CONFIG", None) is not None:
        return "engine"
    parse = getattr(cls, "parse_config_and_api", None)
    if parse is None:
        return "nobody"
    return "engine" if getattr(parse, "parsed_by_engine", False) else "feature"
