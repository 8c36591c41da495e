"""Feature classes: how sessions find and call them, and what happens to their errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_logs import section

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.base import BaseConfigAPIMapper, FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method, namespace_data

Initialize = Callable[..., Any]
HEAD = "from nvdlfw_inspect.registry import Registry, api_method\n"
FEATURE = HEAD + (
    "@Registry.register_feature(namespace='ns')\n"
    "class {name}:\n"
    "    @api_method\n"
    "    def look(self, config):\n"
    "        return {value!r}\n"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "features"
    path.mkdir()
    return path


def look(layer: str = "fc1") -> Any:
    return debug_api.ns.look(layer_name=layer)


def test_files_are_found_in_folders(initialize: Initialize, directory: Path) -> None:
    (directory / "sub").mkdir()
    (directory / "sub" / "mine.py").write_text(FEATURE.format(name="Mine", value=7))
    path, modules = list(sys.path), set(sys.modules)
    for kind in (str, Path, lambda d: [d]):
        initialize({"s": section("Mine")}, feature_dirs=kind(directory))
        assert look() == 7
        debug_api.end_debug()
    assert sys.path == path
    assert "mine" not in set(sys.modules) - modules
    assert "Mine" not in namespace_data("ns").features
    with pytest.raises(ValueError, match="'ns'"):
        initialize({"s": section("Mine")})


def test_files_import_their_neighbours(initialize: Initialize, directory: Path) -> None:
    (directory / "a_first.py").write_text(
        "from z_helper import VALUE, Base\nimport z_parts.more\n"
        + FEATURE.format(name="Mine", value=7)
        + "\nVALUE, z_parts.more.VALUE\n"
    )
    (directory / "z_parts").mkdir()
    (directory / "z_parts" / "__init__.py").touch()
    (directory / "z_parts" / "more.py").write_text("VALUE = 9\n")
    (directory / "z_helper.py").write_text(FEATURE.format(name="Base", value=8) + "VALUE = 9\n")
    config = {"s": section("Mine"), "t": section("Base", "fc2")}
    for _ in range(2):
        initialize(config, feature_dirs=directory)
        assert (look("fc1"), look("fc2")) == (7, 8)
        debug_api.end_debug()


def test_a_file_is_read_anew_by_every_session(
    initialize: Initialize, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (1, 22, 333):
        (directory / "mine.py").write_text(FEATURE.format(name="Mine", value=value))
        initialize({"s": section("Mine")}, feature_dirs=directory)
        assert look() == value
        if value == 22:  # the program imports another file of this name
            monkeypatch.setitem(sys.modules, "mine", sys)
        debug_api.end_debug()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\nraise KeyError('x')\n", "line 2: KeyError: 'x'"),
        ("def f(:\n", "line 1: SyntaxError"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        ("import not_installed\n", "line 1: ModuleNotFoundError"),
    ],
)
def test_a_broken_file_is_named(
    initialize: Initialize, directory: Path, text: str, reason: str
) -> None:
    (directory / "a_broken.py").write_text(text)
    (directory / "mine.py").write_text(FEATURE.format(name="Mine", value=7))
    with pytest.warns(UserWarning, match=r"a_broken\.py") as caught:
        initialize({"s": section("Mine")}, feature_dirs=directory)
    assert reason in str(caught[0].message)
    assert look() == 7
    debug_api.end_debug()
    with (
        pytest.warns(UserWarning, match=r"a_broken\.py"),
        pytest.raises(ValueError, match=rf"Other(.|\n)*a_broken\.py is not loaded: {reason}"),
    ):
        initialize({"s": section("Other")}, feature_dirs=directory)


def test_a_feature_that_cannot_be_created_is_named(initialize: Initialize, directory: Path) -> None:
    text = FEATURE.format(name="Mine", value=7) + "    def __init__(self):\n        1 / 0\n"
    (directory / "mine.py").write_text(text)
    with pytest.raises(RuntimeError, match=r"ns\.Mine of .*mine\.py.*ZeroDivisionError"):
        initialize({}, feature_dirs=directory)
    initialize({})


def test_a_file_that_is_imported_already_is_left_alone(
    initialize: Initialize, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "imported_features.py").write_text(FEATURE.format(name="Mine", value=7))
    monkeypatch.syspath_prepend(directory)
    module = __import__("imported_features")
    initialize({"s": section("Mine")}, feature_dirs=directory)
    assert type(Registry.data["ns"].features["Mine"]) is module.Mine
    monkeypatch.delitem(sys.modules, "imported_features")


def test_the_name_of_another_file_is_taken(initialize: Initialize, directory: Path) -> None:
    (directory / "a.py").write_text(FEATURE.format(name="Mine", value=1))
    (directory / "b.py").write_text(FEATURE.format(name="Mine", value=2))
    with pytest.warns(UserWarning, match=r"ns\.Mine of .*b\.py is ignored: .*a\.py"):
        initialize({"s": section("Mine")}, feature_dirs=directory)
    assert look() == 1


def test_a_name_is_taken_within_a_file_too(initialize: Initialize, directory: Path) -> None:
    (directory / "a.py").write_text("\n".join(FEATURE.format(name="Mine", value=v) for v in (1, 2)))
    with pytest.warns(UserWarning, match=r"ns\.Mine of .*a\.py is ignored: .*a\.py has defined it"):
        initialize({"s": section("Mine")}, feature_dirs=directory)
    assert look() == 1


def test_a_class_may_be_defined_again(initialize: Initialize) -> None:
    for value in (1, 2):

        @Registry.register_feature(namespace="ns")
        class Mine:
            @api_method
            def look(self, config: Any, value: int = value) -> int:
                return value

        initialize({"s": section("Mine")})
        assert look() == value
        debug_api.end_debug()


def test_sessions_have_instances_of_their_own(initialize: Initialize) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        def __init__(self) -> None:
            self.count = 0

        @api_method
        def look(self) -> int:
            self.count += 1
            return self.count

    for _ in range(2):
        assert Registry.data["ns"].deferred_features == [Mine]
        initialize({"s": section("Mine")})
        assert Registry.data["ns"].deferred_features == []
        assert look() == 1
        debug_api.end_debug()


def test_methods_take_what_they_name(initialize: Initialize) -> None:
    seen: list[Any] = []

    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def look(self, layer_name: str, gemm: str, out: Any, tensor: int = 5) -> None:
            seen.append((layer_name, gemm, out, tensor))

        @api_method
        def look_closely(self, config: dict, **kwargs: Any) -> None:
            seen.append(kwargs)

        @api_method
        def look_away(self) -> None:
            seen.append("nothing")

    initialize({"s": section("Mine")})
    call = debug_api.DEBUG_MANAGER.call
    call("ns", "look", layer_name="fc1", gemm="fprop", tp_size=2)
    call("ns", "look", layer_name="fc1", tensor=6)
    call("ns", "look_closely", layer_name="fc1", anything=3)
    call("ns", "look_away", layer_name="fc1", anything=3)
    assert seen == [
        ("fc1", "fprop", None, 5),
        ("fc1", None, None, 6),
        {"layer_name": "fc1", "iteration": 0, "anything": 3},
        "nothing",
    ]


def test_a_changed_configuration_does_not_stay_changed(initialize: Initialize) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def look(self, config: dict[str, Any]) -> int:
            return config.pop("level")

    initialize({"s": section("Mine", level=3)})
    assert (look(), look()) == (3, 3)


@pytest.mark.parametrize(
    ("raised", "surfaces"),
    [
        (KeyError("lost"), RuntimeError),
        (AssertionError("wrong"), RuntimeError),
        (ValueError("wrong"), ValueError),
        (TypeError("wrong"), TypeError),
        (NotImplementedError("wrong"), NotImplementedError),
    ],
)
def test_what_a_feature_raises_says_where(
    initialize: Initialize, raised: Exception, surfaces: type[Exception]
) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        CONFIG = FeatureConfig(tensors=("weight",), gemms=True)

        @api_method
        def modify_tensor_enabled(self, config: Any, iteration: int) -> bool:
            if iteration == 3:
                raise raised
            return True

        @api_method
        def modify_tensor(self, config: Any) -> None:
            raise raised

    manager = initialize({"s": section("Mine", tensors=["weight"], gemms=["fprop"])})
    place = "feature Mine, layer a.fc1, tensor weight, gemm fprop, iteration {}"
    target = {"layer_name": "a.fc1", "tensor_name": "weight", "gemm": "fprop"}
    for iteration in (2, 3):
        manager.iteration = iteration
        with pytest.raises(surfaces, match=place.format(iteration)) as caught:
            manager.call("ns", "modify_tensor", **target)
        assert caught.value.__cause__ is raised


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "yes",
        (True, "soon"),
        (True, 1, 2),
        [False, 3],
        (True, 2**70),
        np.array([True, False]),
        (np.array([True, False]), 3),
    ],
)
def test_answers_are_checked(initialize: Initialize, answer: Any) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def look_enabled(self) -> Any:
            return answer

    manager = initialize({"s": section("Mine")})
    with pytest.raises(TypeError, match=r"expected bool or .*feature Mine, layer fc1, iteration 0"):
        manager.decide("ns", "look_enabled", layer_name="fc1")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (True, (True, 6)),
        (False, (False, 6)),
        ((True, None), (True, None)),
        ((False, 9), (False, 9)),
        ((np.True_, np.int64(9)), (True, 9)),
    ],
)
def test_answers_say_how_long_they_hold(initialize: Initialize, answer: Any, expected: Any) -> None:
    asked = []

    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def look_enabled(self, iteration: int) -> Any:
            asked.append(iteration)
            return answer

    manager = initialize({"s": section("Mine")}, init_training_step=5)
    for _ in range(3):
        assert manager.decide("ns", "look_enabled", layer_name="fc1") == expected
    assert asked == [5]


def test_modify_needs_exactly_one(initialize: Initialize) -> None:
    for name in ("One", "Two"):

        class Modifies:
            CONFIG = FeatureConfig(tensors=("weight",))

            @api_method
            def modify_tensor_enabled(self, config: Any) -> bool:
                return True

            @api_method
            def modify_tensor(self, tensor: int) -> int:
                return tensor + 1

        Modifies.__name__ = name
        Registry.register_feature(namespace="ns")(Modifies)
    sections = {n: section(n, f"fc{i}", tensors=["weight"]) for i, n in enumerate(("One", "Two"))}
    manager = initialize({**sections, "both": section("One", "fc1", tensors=["weight"])})

    def modify(layer: str) -> int:
        return manager.call("ns", "modify_tensor", layer_name=layer, tensor_name="weight", tensor=1)

    assert modify("fc0") == 2
    with pytest.raises(RuntimeError, match=r"Two of section Two and One of section both"):
        modify("fc1")
    with pytest.raises(NotImplementedError, match="layer qkv"):
        modify("qkv")


def test_inspection_returns_nothing(initialize: Initialize) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def inspect_tensor(self) -> int:
            return 1

    manager = initialize({"s": section("Mine")})
    with pytest.raises(TypeError, match="expected feature Mine to return None"):
        manager.call("ns", "inspect_tensor", layer_name="fc1")


def test_a_feature_that_parses_itself(initialize: Initialize) -> None:
    parsed = []

    @Registry.register_feature(namespace="ns")
    class Mine(BaseConfigAPIMapper):
        def parse_config_and_api(self, config: dict, **kwargs: Any) -> Any:
            parsed.append((config, kwargs["tensor_name"]))
            return kwargs["tensor_name"] == "weight", {"own": config["level"]}

        @api_method
        def look(self, config: dict) -> Any:
            return config

    manager = initialize({"s": section("Mine", level=3)})
    for _ in range(2):
        weight = manager.call("ns", "look", layer_name="fc1", tensor_name="weight")
        activation = manager.call("ns", "look", layer_name="fc1", tensor_name="activation")
        assert (weight, activation) == ({"own": 3}, None)
    written = {"enabled": True, "level": 3}
    assert parsed == [(written, "weight"), (written, "activation")], "once for each"


@pytest.mark.parametrize("answer", [None, True, (True, 5), (True, {}, 1)])
def test_what_a_parser_returns_is_checked(initialize: Initialize, answer: Any) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        def parse_config_and_api(self, config: dict, **kwargs: Any) -> Any:
            return answer

        @api_method
        def look(self) -> None:
            """Never called."""

    manager = initialize({"s": section("Mine")})
    place = r"\(feature Mine, layer fc1, tensor weight, gemm fprop\)"
    with pytest.raises(TypeError, match=rf"expected \(acts, config\), got .* {place}"):
        manager.call("ns", "look", layer_name="fc1", tensor_name="weight", gemm="fprop")


def test_a_feature_without_a_parser_gets_what_is_written(initialize: Initialize) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def look(self, config: dict) -> Any:
            return config

    manager = initialize({"s": section("Mine", tensors=["weight"], more={"a": [1, None]})})
    weight = manager.call("ns", "look", layer_name="fc1", tensor_name="weight")
    assert weight == {"tensors": ["weight"], "more": {"a": [1, None]}}
    assert manager.call("ns", "look", layer_name="fc1", tensor_name="activation") is None
