"""The interface for programs: own namespaces, classes that read configurations, checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inspect_logs import messages, section

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.debug_features.generic_feature_api import GenericConfigAPIMapper
from nvdlfw_inspect.logging import custom_assert
from nvdlfw_inspect.registry import Registry, api_method

Initialize = Callable[..., Any]


class Defaults:
    """Default methods, which run if no feature acts."""

    def look(self, config: dict, layer_name: str, depth: int) -> Any:
        return config, layer_name, depth


@pytest.fixture
def own() -> Iterator[type]:
    """Registers a namespace whose features act if `depth` is above 1."""

    @Registry.register_namespace_api(namespace="own")
    class Own(BaseNamespaceAPI):
        def __init__(self) -> None:
            BaseNamespaceAPI.__init__(self)
            self._default_api_impl = Defaults()

        def routing_condition(
            self, api_name: str, config: dict, layer_name: str, feature_obj: Any, **kwargs: Any
        ) -> Any:
            return config["enabled"] and kwargs["depth"] > 1, {"level": config["level"]}

    @Registry.register_feature(namespace="own")
    class Mine:
        @api_method
        def look(self, config: dict, layer_name: str, depth: int) -> Any:
            return config, depth

        @api_method
        def listen(self, config: dict, layer_name: str, depth: int) -> Any:
            return config, depth

    yield Own
    Registry.data.pop("own").api = None


@pytest.mark.usefixtures("own")
def test_a_namespace_of_its_own(initialize: Initialize) -> None:
    initialize({"s": section("Mine", namespace="own", level=3)})
    assert debug_api.own.look("fc1", depth=2) == debug_api.own.listen("fc1", depth=2)
    assert debug_api.own.look("fc1", depth=2) == ({"level": 3}, 2)
    assert debug_api.own.look("fc1", depth=1) == ({}, "fc1", 1), "the default"
    assert debug_api.own.look("qkv", depth=2) == ({}, "qkv", 2)
    assert debug_api.own.listen("fc1", depth=1) == {}, "there is no default"


@pytest.mark.usefixtures("own")
def test_a_namespace_knows_its_features(initialize: Initialize) -> None:
    initialize({"s": section("Mine", namespace="own", level=3)})
    assert type(debug_api.own.namespace_features["Mine"]).__name__ == "Mine"
    assert debug_api.own.namespace_features is Registry.data["own"].features
    assert debug_api.own.api_to_features_map == {"look": ["Mine"], "listen": ["Mine"]}


def test_results_are_merged_with_the_configurations_by_name(
    own: Any, initialize: Initialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    @Registry.register_feature(namespace="own")
    class Other:
        @api_method
        def look(self, config: dict, layer_name: str, depth: int) -> int:
            return depth + 1

    def merge(self: Any, *arguments: Any, **kwargs: Any) -> Any:
        return arguments, kwargs

    monkeypatch.setattr(own, "is_multiple_feature_invocation_allowed", lambda *_: True)
    monkeypatch.setattr(own, "handle_multi_feature_output", merge)
    mine = section("Mine", namespace="own", level=3)
    mine["own"]["Other"] = {"enabled": True, "level": 4}
    initialize({"s": mine})
    arguments, kwargs = debug_api.own.look("fc1", depth=2)
    assert arguments == (
        "look",
        [({"level": 3}, 2), 3],
        {"Mine": {"level": 3}, "Other": {"level": 4}},
    )
    assert kwargs == {"depth": 2}


def test_a_class_that_cannot_route_is_refused() -> None:
    class Nothing:
        pass

    with pytest.raises(TypeError, match=r"a subclass of BaseNamespaceAPI, got Nothing .*empty"):
        Registry.register_namespace_api(namespace="empty")(Nothing)
    assert "empty" not in Registry.data


STRUCT = [{"tensor": "weight", "freq": 5}, {"tensor": "weight", "freq": 6}]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tensors": ["weight", "output"], "freq": 2}, {"tensor": "weight", "freq": 2}),
        ({"tensors": "weight"}, {"tensor": "weight"}),
        ({"tensors": "weights"}, None),
        ({"tensors_struct": STRUCT, "freq": 2, "a": 1}, {"tensor": "weight", "freq": 5, "a": 1}),
        ({"tensors_struct": STRUCT, "tensors": ["weight"]}, {"tensor": "weight", "freq": 5}),
        ({"tensors_struct": [{"tensor": "output"}], "tensors": ["weight"]}, None),
    ],
)
def test_what_a_configuration_says_for_a_tensor(config: dict, said: dict | None) -> None:
    class Mine(BaseConfigAPIMapper):
        def parse_config_and_api(self, config: dict, **kwargs: Any) -> Any:
            found = self._process_tensor_config(config, kwargs["tensor_name"])
            return found is not None, found

    call = {"tensor_parsing": True, "tensor_name": "weight"}
    written = {"enabled": True, **config}
    with_enabled = None if said is None else {"enabled": True, **said}
    assert Mine().parse_config_and_api(written, **call) == (said is not None, with_enabled)
    assert GenericConfigAPIMapper().parse_config_and_api(written, **call) == (
        said is not None,
        said,
    )
    assert GenericConfigAPIMapper().parse_config_and_api(written) == (True, config)


def test_a_configuration_that_names_no_tensors() -> None:
    with pytest.raises(ValueError, match=r"expected tensors or tensors_struct .* got \['freq'\]"):
        GenericConfigAPIMapper().parse_config_and_api(
            {"freq": 3}, tensor_parsing=True, tensor_name="weight"
        )


def test_gemms_are_chosen_before_tensors() -> None:
    pytest.importorskip("torch")
    from transformer_engine.debug.features.api import TEConfigAPIMapper  # noqa: PLC0415

    def parse(config: dict, gemm: str) -> Any:
        return TEConfigAPIMapper().parse_config_and_api(
            {"enabled": True, **config},
            gemm_parsing=True,
            gemm=gemm,
            tensor_parsing=True,
            tensor_name="weight",
        )

    inner = {"gemm": "dgrad", "tensors_struct": [{"tensor": "weight", "margin": 2}]}
    config = {"margin": 1, "tensors": ["weight"], "gemms_struct": [{"gemm": "fprop"}, inner]}
    assert parse(config, "fprop") == (True, {"gemm": "fprop", "tensor": "weight", "margin": 1})
    assert parse(config, "dgrad") == (True, {"gemm": "dgrad", "tensor": "weight", "margin": 2})
    assert parse(config, "wgrad") == (False, None)
    with pytest.raises(ValueError, match="expected gemms or gemms_struct"):
        parse({"tensors": ["weight"]}, "fprop")


def test_checks_of_features_are_logged_and_name_the_call(
    initialize: Initialize, tmp_path: Path
) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def look(self, tensor: int) -> int:
            custom_assert(tensor > 0, "expected a tensor")
            return tensor

    initialize({"s": section("Mine")})
    assert debug_api.ns.look(layer_name="fc1", tensor=3) == 3
    with pytest.raises(RuntimeError, match=r"AssertionError: expected a tensor .*layer fc1"):
        debug_api.ns.look(layer_name="fc1", tensor=0)
    assert messages(tmp_path)[-1] == "ERROR - expected a tensor"


def test_a_feature_without_docstring_has_not_that_of_its_base(
    initialize: Initialize, capsys: pytest.CaptureFixture[str]
) -> None:
    @Registry.register_feature(namespace="ns")
    class Mute(GenericConfigAPIMapper):
        pass

    initialize()
    debug_api.explain_features("ns.Mute")
    lines = ["-----", "feature: ns.Mute", "None", "*****"]
    assert capsys.readouterr().out.splitlines() == [f"{line} " for line in lines]
