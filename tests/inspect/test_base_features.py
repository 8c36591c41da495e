"""Features of the namespace `base`, names of layers, and small modules that users import."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_logs import messages, rows, section

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect import utils
from nvdlfw_inspect.config_manager import ConfigManager, ConfigSpec, is_layer_in_cfg

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

Initialize = Callable[..., Any]
STATS = ["min", "max", "mean", "std", "l1_norm", "l2_norm"]


def config(**keys: Any) -> dict[str, Any]:
    return {"s": section("LogTensorStats", "router", "base", tensors=["activation"], **keys)}


def log(tensor: Any, **kwargs: Any) -> dict[str, Any]:
    arguments = {"layer_name": "l.router", "tensor_name": "activation", **kwargs}
    return debug_api.log_tensor_stats(tensor=tensor, **arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_statistics(initialize: Initialize, tmp_path: Path, dtype: torch.dtype) -> None:
    initialize(config(stats=STATS))
    tensor = torch.randn(7, 9).to(dtype)
    logged = log(tensor)
    x = tensor.double()
    expected = {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": x.abs().sum(),
        "l2_norm": x.norm(),
    }
    assert list(logged) == STATS
    for name, value in expected.items():
        assert float(logged[name]) == pytest.approx(float(value), rel=1e-6, abs=1e-7)
    debug_api.step()
    assert [row["name"] for row in rows(tmp_path)] == [f"l.router_activation_{s}" for s in STATS]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_statistics_of_integers(initialize: Initialize, dtype: torch.dtype) -> None:
    initialize(config(stats=STATS))
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    logged = [float(value) for value in log(tensor).values()]
    assert logged == pytest.approx([0, 1, 0.5, (1 / 3) ** 0.5, 2, 2**0.5])


def test_when_nothing_is_logged(initialize: Initialize, tmp_path: Path) -> None:
    initialize(config(stats="min", freq=2, start_step=2))
    ones = torch.ones(3)
    assert log(ones) == {}, "too early"
    assert log(ones, iteration=3) == {}, "between"
    assert log(ones, iteration=4) != {}
    assert log(ones, iteration=4, layer_name="fc1") == {}, "another layer"
    assert log(ones, iteration=4, tensor_name="weight") == {}, "another tensor"
    assert debug_api.base.log_tensor_stats(
        layer_name="l.router", tensor_name="activation", tensor=ones, iteration=6
    )
    debug_api.step()
    assert [row["iteration"] for row in rows(tmp_path)] == [4, 6]


def test_names_of_statistics_in_any_case(initialize: Initialize) -> None:
    with pytest.raises(ValueError, match="'maen'; did you mean 'mean'"):
        initialize(config(stats=["maen"]))
    initialize(config(stats=["MAX", "Min"]))
    assert list(log(torch.ones(3))) == ["max", "min"]


@pytest.mark.parametrize("layer_name", ["l.router", "of no section"])
@pytest.mark.parametrize("absent", ["tensor", "tensor_name"])
def test_absent_arguments_are_named(initialize: Initialize, layer_name: str, absent: str) -> None:
    initialize(config(stats=["min"]))
    arguments = {"tensor": torch.ones(3), "tensor_name": "activation"}
    del arguments[absent]
    for call in (debug_api.log_tensor_stats, debug_api.base.log_tensor_stats):
        with pytest.raises(ValueError, match=f"expected {absent}, got none .layer {layer_name}"):
            call(layer_name, **arguments)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [({"tensor": 1.5}, "float and str"), ({"tensor_name": None}, "Tensor and NoneType")],
)
def test_what_is_no_tensor_is_refused(
    initialize: Initialize, wrong: dict[str, Any], got: str
) -> None:
    initialize(config(stats=["min"]))
    with pytest.raises(
        TypeError, match=f"expected a torch.Tensor and its name as a str, got {got}"
    ):
        log(**{"tensor": torch.ones(3), **wrong})


def test_a_tensor_that_is_none_on_a_layer_of_no_section(initialize: Initialize) -> None:
    initialize(config(stats=["min"]))
    assert log(torch.ones(3))
    assert log(None, layer_name="of no section") == {}


def test_empty_tensors(initialize: Initialize, tmp_path: Path) -> None:
    initialize(config(stats=["min"]))
    assert log(torch.empty(0)) == {}
    debug_api.step()
    assert rows(tmp_path)[0]["value"] is None


def test_one_element_has_no_deviation(initialize: Initialize) -> None:
    initialize(config(stats=["max"]))
    assert float(log(torch.tensor([math.inf]))["max"]) == math.inf


def test_models_are_named(initialize: Initialize, tmp_path: Path) -> None:
    initialize()
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.ReLU()])
    layers[1].layer_number = 7
    model = torch.nn.Module()
    model.layers, model.head = layers, torch.nn.Sequential(torch.nn.Linear(2, 2))
    wrapped = type("Wrapper", (), {"module": model})()
    debug_api.infer_and_assign_layer_names([wrapped])
    assert layers[0].name == "model.layers.0"
    assert layers[1].name == "model.layers.7"
    assert model.head[0].name == "model.head.0"
    assert not hasattr(layers, "name")
    assert "INFO - Assigned layer name: model.head" in messages(tmp_path)
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        debug_api.infer_and_assign_layer_names(3)


def test_modules_whose_name_cannot_be_set_keep_it(initialize: Initialize, tmp_path: Path) -> None:
    class Fixed(torch.nn.Module):
        name = property(lambda self: "fixed")

    initialize()
    fixed, parent = Fixed(), torch.nn.Module()
    fixed.head, parent.name = torch.nn.Linear(2, 2), fixed
    debug_api.infer_and_assign_layer_names(parent)
    assert (parent.name, fixed.name, fixed.head.name) == (fixed, "fixed", "model.name.head")
    assert sum("Assigned layer name" in line for line in messages(tmp_path)) == 1


@pytest.mark.parametrize(
    ("numbers", "names"), [((None, None), "01"), ((3, 3), "01"), ((2, 1), "21")]
)
def test_layers_of_a_list_have_names_of_their_own(
    initialize: Initialize, numbers: tuple[int | None, ...], names: str
) -> None:
    initialize()
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    for layer, number in zip(layers, numbers, strict=True):
        layer.layer_number = number
    debug_api.infer_and_assign_layer_names(layers)
    assert [layer.name for layer in layers] == [f"model.{name}" for name in names]


def test_the_configuration_of_a_layer(initialize: Initialize) -> None:
    assert ConfigManager.get_config_for_layer("l.router") == {}
    initialize(config(stats=["min"]))
    assert ConfigManager.get_config_for_layer("l.router") == {
        "base": {"LogTensorStats": {"enabled": True, "stats": ["min"], "tensors": ["activation"]}}
    }
    assert ConfigManager.get_config_for_layer("fc1") == {}


@pytest.mark.parametrize("integer", [2, torch.tensor(2), np.int64(2), np.uint8(2)])
def test_integers_of_other_libraries(initialize: Initialize, integer: Any) -> None:
    initialize(config(stats=["min"], freq=integer, start_end_list=((integer, 8),)))
    written = ConfigManager.get_config_for_layer("l.router")["base"]["LogTensorStats"]
    assert (written["freq"], written["start_end_list"]) == (2, [[2, 8]])
    assert type(written["freq"]) is int
    assert [bool(log(torch.ones(3), iteration=i)) for i in range(5)] == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_a_range_is_a_list(initialize: Initialize) -> None:
    selected = config(stats=["min"])
    selected["s"]["layers"] = {"layer_numbers": range(1, 3)}
    initialize(selected)
    assert [bool(log(torch.ones(3), layer_name=f"l.{i}")) for i in range(4)] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("value", [{2}, torch.tensor([2, 3]), torch.tensor(2.0), object()])
def test_other_values_are_refused(initialize: Initialize, value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"float or None at s\.base\.LogTensorStats\.freq, got <class"
    ):
        initialize(config(stats=["min"], freq=value))


@pytest.mark.parametrize(
    "keys",
    [{"tensors": ["logits"]}, {"tensors_struct": [{"tensor": "logits"}], "stas": ["min"]}],
)
def test_missing_statistics_of_a_tensor_of_the_program(
    initialize: Initialize, keys: dict[str, Any]
) -> None:
    with pytest.raises(
        ValueError, match=r"s\.base\.LogTensorStats: expected the key stats, got none"
    ):
        initialize({"s": section("LogTensorStats", "router", "base", **keys)})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"tensors": "logits", "frequency": 2},
            r"\.frequency: .* got 'frequency'; did you mean 'fr",
        ),
        ({"tensors_struct": [{"tensor": "x", "stat": "max"}]}, r"\[0\]\.stat: .* mean 'stats'"),
        ({}, "expected the key tensors or tensors_struct, got none"),
    ],
)
def test_mistakes_in_a_configuration(
    initialize: Initialize, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=rf"s\.base\.LogTensorStats.*{problem}"):
        initialize({"s": section("LogTensorStats", "router", "base", stats="min", **keys)})


def test_selectors_by_hand() -> None:
    spec = ConfigSpec()
    assert not is_layer_in_cfg("fc1", spec)
    spec.initialize({"layer_types": ["fc1"]})
    assert is_layer_in_cfg("a.fc1", spec)
    assert not is_layer_in_cfg("a.fc2", spec)
    spec.reset()
    assert not is_layer_in_cfg("a.fc1", spec)
    with pytest.raises(ValueError, match="layer_typos"):
        spec.initialize({"layer_typos": ["fc1"]})


@pytest.mark.parametrize(
    "layers",
    [{"layer_types": ["fc1", ""]}, {"exact_layer_names": ""}, {"layer_name_regex_pattern": ""}],
)
def test_empty_selectors_are_refused(initialize: Initialize, layers: dict[str, Any]) -> None:
    feature = {"DisableFP8Layer": {"enabled": True}}
    with pytest.raises(ValueError, match=r"s\.layers\.\w+.*: expected a non-empty .*, got ''"):
        initialize({"s": {"enabled": True, "layers": layers, "transformer_engine": feature}})


def test_one_process_gathers_from_itself() -> None:
    x = torch.ones(2, 3)
    assert utils.get_distributed_world_size() == 1
    assert utils.gather_along_first_dim(x) == (x, None)
    assert utils.gather_tensor_on_last_rank(x) == (x, None)


def test_docstrings_are_appended() -> None:
    @utils.append_parent_docstring(int)
    class Number:
        """Mine."""

    assert Number.__doc__.startswith("Mine.\n")
    assert int.__doc__ in Number.__doc__
