"""Warnings at the start of a session about mistakes in feature classes and arguments."""

import warnings
from pathlib import Path
from typing import Any

import pytest

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.registry import Registry, _forget, api_method


def nothing(self: Any, config: Any, iteration: int) -> None:
    """Does nothing."""


def warned(tmp_path: Path, **methods: Any) -> list[str]:
    """Returns the warnings of a session with a feature that has these methods."""
    cls = Registry.register_feature(namespace="transformer_engine")(type("Slip", (), methods))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            debug_api.initialize({}, log_dir=tmp_path)
            debug_api.end_debug()
    finally:
        for id, registration in list(Registry._classes.items()):
            if registration.cls is cls:
                _forget(id)
    return [str(one.message) for one in caught]


def marked() -> Any:
    return api_method(lambda self, config, iteration: None)


def test_methods_that_nothing_calls(tmp_path: Path) -> None:
    assert warned(tmp_path, modify_tensor=nothing) == [
        "[register_feature] Slip.modify_tensor has no @api_method: nothing calls it"
    ]
    assert warned(tmp_path, inspect_tensors=marked()) == [
        "[register_feature] Slip.inspect_tensors: nothing calls it; did you mean inspect_tensor?"
    ]
    assert warned(tmp_path, inspect_tensor=marked()) == [
        "[register_feature] Slip.inspect_tensor is never called without inspect_tensor_enabled, "
        "whose default is False"
    ]


def test_calls_of_ones_own_and_helpers_are_no_slips(tmp_path: Path) -> None:
    methods = {"inspect_tensor": marked(), "inspect_tensor_enabled": marked()}
    assert warned(tmp_path, **methods, my_call=marked(), scale_of=nothing) == []


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"log_dir": 5}, TypeError, "expected log_dir as a path, got int"),
        ({"tb_writer": "runs"}, TypeError, "expected tb_writer with add_scalar, got str"),
        ({"config_file": "/"}, ValueError, "expected a configuration file, got /: a directory"),
    ],
)
def test_arguments_of_initialize(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        debug_api.initialize(**{"log_dir": tmp_path, **arguments})


def test_an_unknown_argument_of_initialize_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="argument config is not known; did you mean config_file"):
        debug_api.initialize(config="config.yaml", log_dir=tmp_path)
    text = "argument log_folder is not known; did you mean log_dir"
    with pytest.warns(UserWarning, match=text):
        debug_api.initialize(log_folder="logs", log_dir=tmp_path)
    debug_api.end_debug()
