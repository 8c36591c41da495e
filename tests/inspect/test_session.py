"""Sessions as users see them: they begin, step and end as documented."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_logs import messages, rows, section, statistics

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect import startup
from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.debug_manager import subscribe, unsubscribe
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import Registry, api_method

Initialize = Callable[..., Any]


def register_counter(**config: Any) -> type:
    @Registry.register_feature(namespace="ns")
    class Counter:
        """Counts."""

        CONFIG = FeatureConfig(tensors=("activation", "weight"), gemms=True, **config)

        @api_method
        def inspect_tensor_enabled(self, iteration: int) -> tuple[bool, int]:
            return True, iteration + 1

        @api_method
        def inspect_tensor(self, tensor: list) -> None:
            tensor.append(1)

    return Counter


def test_second_initialize_is_an_error(initialize: Initialize) -> None:
    manager = initialize()
    with pytest.raises(ValueError, match="end_debug"):
        initialize()
    assert debug_api.DEBUG_MANAGER is manager
    debug_api.end_debug()
    assert debug_api.DEBUG_MANAGER is None
    assert initialize().epoch > manager.epoch


@pytest.mark.usefixtures("notebook")
def test_second_initialize_replaces_in_a_notebook(
    initialize: Initialize, capsys: pytest.CaptureFixture[str]
) -> None:
    first = initialize()
    assert initialize() is not first
    assert "debug session was running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"config": {"s": section("Unknown")}}, ValueError),
        ({"config": {"s\ud800": section("Counter")}}, ValueError),
        ({"config": {"s": {"enabled": True, "layers": ["\ud800"]}}}, ValueError),
        ({"config": 3}, TypeError),
        ({"config": "missing.yaml"}, FileNotFoundError),
        ({"feature_dirs": "missing"}, FileNotFoundError),
        ({"feature_dirs": 3}, ValueError),
        ({"init_training_step": "first"}, TypeError),
        ({"init_training_step": -1}, ValueError),
        ({"init_training_step": 1 << 63}, ValueError),
        ({"statistics_logger": object()}, TypeError),
        ({"log_dir": "/dev/null/logs"}, ValueError),
    ],
)
def test_failed_initialize_leaves_nothing_behind(
    initialize: Initialize, arguments: dict[str, Any], error: type[Exception]
) -> None:
    register_counter()
    with pytest.raises(error):
        initialize(**arguments)
    assert debug_api.DEBUG_MANAGER is None
    assert not Registry.data["ns"].features
    initialize({"s": section("Counter", tensors=["weight"], gemms=["fprop"])})


@pytest.mark.parametrize(
    "part", ["import_built_in", "_load", "_log_options", "DebugManager", "_add_loggers"]
)
def test_an_initialize_that_is_interrupted_leaves_nothing_behind(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    register_counter()
    config = {"s": section("Counter", tensors=["weight"], gemms=["fprop"])}
    with monkeypatch.context() as patch:

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(startup, part, interrupted)
        with pytest.raises(KeyboardInterrupt):
            initialize(config)
    assert debug_api.DEBUG_MANAGER is None
    assert not Registry.data["ns"].features and not MetricLogger.enabled_loggers
    initialize(config)


def test_names_of_all_characters(initialize: Initialize, tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff.yaml")
    file.write_text('"\\N\\_é": {enabled: true, layers: {layer_name_regex_pattern: x}}')
    assert initialize(file).config_names == ["\x85\xa0é"]
    debug_api.end_debug()
    with pytest.raises(ValueError, match=r"text of whole characters at .*, got 's\\ud800'"):
        initialize({"s\ud800": {}})
    initialize({})


def test_integers_have_64_bits(initialize: Initialize) -> None:
    with pytest.raises(ValueError, match=r"at most 64 bits at s.freq, got 9223372036854775808"):
        initialize({"s": {"freq": 2**63}})


@pytest.mark.parametrize("what", ["config", "feature_dirs"])
def test_missing_paths_are_explained(initialize: Initialize, what: str) -> None:
    with pytest.raises(ValueError, match="need no feature_dirs"):
        initialize(**{what: "missing"})


def test_a_listener_that_raises_ends_the_session(initialize: Initialize) -> None:
    class Broken:
        def initialized(self, manager: Any) -> None:
            raise RuntimeError("no room")

        def ended(self, manager: Any) -> None:
            pass

    listener = Broken()
    subscribe(listener)
    try:
        with pytest.raises(RuntimeError, match="no room"):
            initialize()
    finally:
        unsubscribe(listener)
    assert debug_api.DEBUG_MANAGER is None
    initialize()


@pytest.mark.parametrize("config", ["", None, {}])
def test_without_configuration_nothing_happens(
    initialize: Initialize, tmp_path: Path, config: Any
) -> None:
    manager = initialize(config)
    assert manager.decide("ns", "inspect_tensor_enabled", layer_name="fc1") == (False, None)
    assert manager.decide("ns", "fp8_gemm_enabled", layer_name="fc1", gemm="fprop") == (True, None)
    debug_api.step()
    assert messages(tmp_path)[0] == f"INFO - Default logging to file enabled at {tmp_path}"


@pytest.mark.parametrize("kind", [str, Path])
def test_configuration_files(initialize: Initialize, tmp_path: Path, kind: Any) -> None:
    register_counter()
    file = tmp_path / "config.yaml"
    file.write_text(
        "awake:\n  enabled: True\n  layers: {layer_types: [fc1]}\n"
        "  ns: {Counter: {enabled: True, tensors: [weight], gemms: [fprop]}}\n"
        "asleep:\n  enabled: False\n  layers: {layer_types: [fc1]}\n"
        "  ns: {Counter: {enabled: True, tensors: [weight], gemms: [fprop]}}\n"
    )
    initialize(kind(file))
    assert messages(tmp_path) == [
        f"INFO - Default logging to file enabled at {tmp_path}",
        f"INFO - Reading config from {file}.",
        "INFO - Loaded configs for dict_keys(['awake', 'asleep']).",
    ]


def test_configuration_as_dict(initialize: Initialize, tmp_path: Path) -> None:
    register_counter()
    initialize({"s": section("Counter", tensors=["weight"], gemms=["fprop"])})
    assert messages(tmp_path)[1:] == [
        "INFO - Reading config from Python dictionary.",
        "INFO - Loaded configs for dict_keys(['s']).",
    ]


def test_steps_are_counted(initialize: Initialize) -> None:
    manager = initialize(init_training_step=5)
    assert manager.iteration == 5
    debug_api.step()
    assert manager.iteration == manager._trainer_iteration_count == 6
    debug_api.initialize_training_step(100)
    with pytest.raises(ValueError, match=r"expected train_step from 0 to 2\^40 - 1, got -1"):
        debug_api.initialize_training_step(-1)
    assert manager.iteration == 100


def test_without_a_session_most_functions_do_nothing() -> None:
    debug_api.step()
    debug_api.initialize_training_step(3)
    debug_api.end_debug()
    debug_api.flush()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: debug_api.log_message("text"), RuntimeError),
        (lambda: debug_api.transformer_engine, RuntimeError),
        (lambda: debug_api.infer_and_assign_layer_names(None), RuntimeError),
        (lambda: debug_api.set_tensor_reduction_group(None), ValueError),
        (debug_api.get_tensor_reduction_group, ValueError),
    ],
)
def test_without_a_session_the_others_say_so(call: Callable[[], Any], error: type) -> None:
    with pytest.raises(error, match="initialize"):
        call()


def test_unknown_arguments_warn(initialize: Initialize) -> None:
    with pytest.warns(UserWarning, match="logger .* did you mean statistics_logger") as caught:
        initialize(logger=3)
    assert caught[0].filename.endswith("conftest.py"), "points at the caller"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("logdir", "log_dir"), ("feature_dir", "feature_dirs"), ("init_training_steps", "init_train")],
)
def test_misspelt_arguments_are_errors(initialize: Initialize, written: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{written} is not known; did you mean {meant}"):
        initialize(**{written: "somewhere"})
    assert debug_api.DEBUG_MANAGER is None


def test_messages_are_written_once_per_session(initialize: Initialize, tmp_path: Path) -> None:
    for _ in range(2):
        initialize()
        for _ in range(2):
            debug_api.log_message("plan", "fc1")
            debug_api.log_message("plan", "fc1", extra_cachable_args=("weight",))
            debug_api.log_message("plan")
        assert messages(tmp_path)[1:] == ["INFO - fc1: plan", "INFO - fc1: plan", "INFO - plan"]
        debug_api.end_debug()


def test_two_sessions_do_not_share_files(initialize: Initialize, tmp_path: Path) -> None:
    for run in range(2):
        manager = initialize(log_dir=tmp_path / str(run))
        manager.log_statistics(0, "fc1", "weight", {"min": 1.0})
        debug_api.log_message("only here")
        debug_api.step()
        debug_api.end_debug()
    for run in range(2):
        assert len(messages(tmp_path / str(run))) == 2
        assert len(statistics(tmp_path / str(run))) == 1
        assert len(rows(tmp_path / str(run))) == 1


def test_features_are_listed_and_explained(
    initialize: Initialize, capsys: pytest.CaptureFixture[str]
) -> None:
    register_counter()
    initialize()
    debug_api.list_features()
    assert "'ns.Counter'" in capsys.readouterr().out
    debug_api.explain_features("ns.Counter")
    assert capsys.readouterr().out == "----- \nfeature: ns.Counter \nCounts. \n***** \n"
    debug_api.explain_features(["Counter"])
    assert "feature: ns.Counter" in capsys.readouterr().out
    debug_api.explain_features(["ns.Absent"])
    assert "feature: ns.Absent is not supported in this tool." in capsys.readouterr().out
    debug_api.explain_features("Countr")
    assert "not supported in this tool; did you mean Counter?" in capsys.readouterr().out
    with pytest.raises(TypeError, match=r"^\[explain_features\] expected the name .*, got 3"):
        debug_api.explain_features(3)
    debug_api.explain_features()
    assert "No feature provided." in capsys.readouterr().out


def test_features_are_listed_and_explained_without_a_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    register_counter()
    debug_api.list_features()
    assert "'ns.Counter'" in capsys.readouterr().out
    debug_api.explain_features("all")
    assert "feature: ns.Counter \nCounts." in capsys.readouterr().out


def test_namespaces(initialize: Initialize) -> None:
    register_counter()
    initialize({"s": section("Counter", tensors=["weight"], gemms=["fprop"])})
    seen: list[int] = []
    debug_api.ns.inspect_tensor(layer_name="a.fc1", tensor_name="weight", tensor=seen)
    debug_api.ns.inspect_tensor(layer_name="a.fc1", tensor_name="activation", tensor=seen)
    debug_api.ns.inspect_tensor(layer_name="a.fc2", tensor_name="weight", tensor=seen)
    assert len(seen) == 1
    ask = debug_api.ns.inspect_tensor_enabled
    assert ask(layer_name="a.fc1", tensor_name="weight") == (True, 1)
    with pytest.raises(ValueError, match="nothing"):
        _ = debug_api.nothing


def test_selectors_that_select_nothing_are_reported(initialize: Initialize, tmp_path: Path) -> None:
    register_counter()
    manager = initialize({"mine": section("Counter", "fc7", tensors=["weight"], gemms=["fprop"])})
    manager.decide("ns", "inspect_tensor_enabled", layer_name="decoder.fc1", tensor_name="weight")
    with pytest.warns(UserWarning, match=r"mine.*fc7.*decoder\.fc1") as caught:
        debug_api.step()
    assert caught[0].filename == __file__
    assert len([m for m in messages(tmp_path) if m.startswith("WARNING")]) == 1
    debug_api.step()


def test_the_reduction_group(initialize: Initialize, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    initialize()
    assert debug_api.get_tensor_reduction_group() is None
    group = torch.distributed.ProcessGroup(0, 1)
    for _ in range(2):
        debug_api.set_tensor_reduction_group(group)
    assert debug_api.get_tensor_reduction_group() is group
    for other in ("group", [0, 1], torch.ones(2)):
        with pytest.raises(TypeError, match="expected group to be a process group"):
            debug_api.set_tensor_reduction_group(other)
    assert debug_api.get_tensor_reduction_group() is group
    assert len([m for m in messages(tmp_path) if "the group that was set" in m]) == 1
    debug_api.end_debug()
    initialize()
    assert debug_api.get_tensor_reduction_group() is None


class Recorder:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def initialized(self, manager: Any) -> None:
        self.events.append(("initialized", debug_api.DEBUG_MANAGER is manager))

    def stepped(self, manager: Any) -> None:
        self.events.append(("stepped", manager.iteration))
        manager.log_statistics(manager.iteration - 1, "fc1", "weight", {"min": 0.5})

    def moved(self, manager: Any) -> None:
        self.events.append(("moved", manager.iteration))

    def ended(self, manager: Any) -> None:
        self.events.append("ended")
        manager.log_statistics(manager.iteration, "fc1", "weight", {"min": 0.25})


def test_listeners_follow_sessions(initialize: Initialize, tmp_path: Path) -> None:
    listener = Recorder()
    manager = initialize()
    manager.drain.append(lambda: listener.events.append("drained"))
    subscribe(listener)
    try:
        debug_api.step()
        assert rows(tmp_path)[-1]["value"] == 0.5, "is on disk when step() returns"
        debug_api.initialize_training_step(7)
        debug_api.flush()
        debug_api.end_debug()
        initialize()
    finally:
        unsubscribe(listener)
    assert listener.events == [
        ("initialized", True),
        ("stepped", 1),
        ("moved", 7),
        "drained",
        "drained",
        "ended",
        ("initialized", True),
    ]
    assert rows(tmp_path)[-1]["value"] == 0.25


def test_what_listeners_raise_surfaces(initialize: Initialize, tmp_path: Path) -> None:
    class Raises(Recorder):
        def stepped(self, manager: Any) -> None:
            super().stepped(manager)
            raise RuntimeError("lost a rank")

    listener = Raises()
    initialize()
    subscribe(listener)
    try:
        with pytest.raises(RuntimeError, match="lost a rank"):
            debug_api.step()
    finally:
        unsubscribe(listener)
    assert len(rows(tmp_path)) == 1, "what was logged is written all the same"
