"""Advice on findings: its text, and the YAML that it suggests."""

import math
from pathlib import Path

import pytest
from synthetic_run import ill, record, write_records, write_run, write_series

from nvdlfw_inspect import _engine
from nvdlfw_inspect.engine import engine
from nvdlfw_inspect.registry import import_built_in
from nvdlfw_inspect.report.advice import TELL, Advice, advise, combined_yaml, headline, to_yaml
from nvdlfw_inspect.report.combine import combine
from nvdlfw_inspect.report.records import read_run
from nvdlfw_inspect.report.rules import RULES, Level
from nvdlfw_inspect.report.verdicts import judge

yaml = pytest.importorskip("yaml")
pytest.importorskip("torch")  # advice uses the rules of the built-in features
LAYER = "model.0.fc1"
NAMESPACE = "transformer_engine"


def advice_on(logdir: Path) -> list[Advice]:
    return advise(judge(read_run(logdir)))


def load(text: str) -> dict:
    """Returns a parsed config, which the engine and PyYAML must read alike without errors."""
    import_built_in()
    loaded = engine().load(text.encode(), "advice.yaml")
    assert (loaded.errors, loaded.warnings) == ([], [])
    parsed = yaml.safe_load(text)
    assert _engine.parse_yaml(text.encode(), "advice.yaml") == parsed
    features = [(name, feature) for name, s in parsed.items() for feature in s[NAMESPACE]]
    layers = [name for s in parsed.values() for name in s["layers"].get("exact_layer_names", [])]
    plans = loaded.plans(layers)
    assert [plan[:2] for plan in plans] == features
    assert all(selected and targets for _, _, selected, targets in plans if layers)
    return parsed


def section(piece: Advice) -> dict:
    (found,) = load(piece.yaml).values()
    assert found["enabled"] is True
    assert all(feature["enabled"] is True for feature in found["transformer_engine"].values())
    return found


def test_every_rule_has_advice() -> None:
    assert {rule.name for rule in RULES} == set(TELL)


def test_underflow_turns_fp8_off_where_the_tensor_is_read(tmp_path: Path) -> None:
    (piece,) = advice_on(write_series(tmp_path, [20.0] * 3, statistic="underflows%"))
    assert piece.title == f"Up to 20 % of the gradient becomes zero in {LAYER}"
    found = section(piece)
    assert found["layers"] == {"exact_layer_names": [LAYER]}
    assert found["transformer_engine"]["DisableFP8GEMM"]["gemms"] == ["dgrad", "wgrad"]


def test_what_only_the_first_step_shows_is_watched(tmp_path: Path) -> None:
    """With delayed scaling, the amax history is empty at the first step."""
    (piece,) = advice_on(write_series(tmp_path, [20.0, 0.0, 0.0], statistic="underflows%"))
    assert piece.title == f"Up to 20 % of the gradient becomes zero in {LAYER}, at step 0 alone"
    assert "harmless unless it comes back" in piece.text
    assert list(section(piece)["transformer_engine"]) == ["LogFp8TensorStats"]


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ([20.0], "DisableFP8GEMM"),
        ([0.0, 20.0, 0.0], "LogFp8TensorStats"),  # it has passed: watch
        ([20.0, 0.0, 3.0], "LogFp8TensorStats"),
    ],
)
def test_what_other_steps_show_counts(tmp_path: Path, values: list[float], feature: str) -> None:
    (piece,) = advice_on(write_series(tmp_path, values, statistic="underflows%"))
    assert piece.title == f"Up to 20 % of the gradient becomes zero in {LAYER}"
    assert list(section(piece)["transformer_engine"]) == [feature]


def test_long_lists_stand_below_each_other() -> None:
    names = ["layer1.layernorm_mlp.fc1", "layer2.layernorm_mlp.fc1"]
    text = to_yaml({"layers": {"exact_layer_names": names}})
    assert text == (
        "layers:\n  exact_layer_names:\n"
        "    - layer1.layernorm_mlp.fc1\n    - layer2.layernorm_mlp.fc1\n"
    )


def test_what_if_suggests_current_scaling(tmp_path: Path) -> None:
    values = {"overflows%": 20.0, "fp8_current_scaling_overflows%": 0.25}
    records = [record(0, LAYER, "activation", name, value) for name, value in values.items()]
    (piece,) = advice_on(write_records(tmp_path, records))
    assert "With current scaling it would be 0.25 %" in piece.text
    scaling = section(piece)["transformer_engine"]["PerTensorScaling"]
    assert scaling == {"enabled": True, "gemms": ["fprop", "wgrad"], "tensors": ["activation"]}


@pytest.mark.parametrize(
    ("what_if", "feature"),
    [
        ([math.nan, 0.25], "PerTensorScaling"),
        ([0.25, math.nan], "PerTensorScaling"),
        ([math.nan, math.nan], "DisableFP8GEMM"),
    ],
)
def test_what_if_with_nan(tmp_path: Path, what_if: list[float], feature: str) -> None:
    series = {"overflows%": [20.0, 20.0], "fp8_current_scaling_overflows%": what_if}
    records = [
        record(i, LAYER, "weight", name, v) for name, vs in series.items() for i, v in enumerate(vs)
    ]
    (piece,) = [p for p in advice_on(write_records(tmp_path, records)) if "Up to" in p.title]
    assert feature in section(piece)["transformer_engine"]


@pytest.mark.parametrize("later", [[math.nan, 0.0], [0.0, math.nan]])
def test_an_overflow_at_the_start_alone_before_a_nan(tmp_path: Path, later: list[float]) -> None:
    values = [60.0, *later, *[0.0] * 40]
    pieces = advice_on(write_series(tmp_path, values, statistic="overflows%"))
    (piece,) = [p for p in pieces if "Up to" in p.title]
    assert "harmless" in piece.text


def test_nan_names_layer_and_step(tmp_path: Path) -> None:
    values = [1.0] * 30 + [math.nan]
    (piece,) = advice_on(write_series(tmp_path, values, statistic="l2_norm"))
    assert piece.title == f"NaN in {LAYER} since step 30"
    features = section(piece)["transformer_engine"]
    assert features["DisableFP8Layer"] == {"enabled": True}
    assert (features["LogTensorStats"]["start_step"], features["LogTensorStats"]["end_step"]) == (
        20,
        30,
    )


@pytest.mark.parametrize(
    ("statistic", "values", "feature"),
    [
        ("cur_amax", [0.0] * 3, "LogTensorStats"),
        ("cur_amax", [1.0, 500.0], "PerTensorScaling"),
        ("dynamic_range", [40.0] * 3, "LogFp8TensorStats"),
    ],
)
def test_feature_that_acts(
    tmp_path: Path, statistic: str, values: list[float], feature: str
) -> None:
    (piece,) = advice_on(write_series(tmp_path, values, statistic=statistic))
    assert feature in section(piece)["transformer_engine"]


def test_growth_of_a_result_is_logged(tmp_path: Path) -> None:
    (piece,) = advice_on(write_series(tmp_path, [1.0, 500.0], tensor="dgrad"))
    assert section(piece)["transformer_engine"]["LogTensorStats"]["tensors"] == ["dgrad"]


def test_noise_turns_fp8_off(tmp_path: Path) -> None:
    records = [record(0, LAYER, "weight", name, 1.0) for name in ("mse", "std")]
    (piece,) = advice_on(write_records(tmp_path, records))
    assert section(piece)["transformer_engine"]["DisableFP8GEMM"]["gemms"] == ["fprop", "dgrad"]


def lossy(levels: dict[str, float], steps: int = 3) -> list[dict]:
    """Returns records of layers, with the percentage of weight values that underflow."""
    return [
        record(step, layer, "weight", "underflows%", share)
        for step in range(steps)
        for layer, share in levels.items()
    ]


def test_one_bad_layer_among_many_to_watch_is_acted_on_alone(tmp_path: Path) -> None:
    shares = {f"model.{i}.fc1": 20.0 if i == 7 else 4.0 for i in range(200)}
    verdicts = judge(read_run(write_records(tmp_path, lossy(shares))))
    bad, watch = advise(verdicts)
    assert (
        headline(verdicts, [bad, watch]) == "Up to 20 % of the weight becomes zero in model.7.fc1"
    )
    assert (bad.level, bad.layers) == (Level.BAD, ["model.7.fc1"])
    assert section(bad)["layers"] == {"exact_layer_names": ["model.7.fc1"]}
    assert watch.title == "Up to 4 % of the weight becomes zero in 199 layers"
    assert watch.level is Level.WATCH
    assert "It is not bad" in watch.text
    assert set(section(watch)["transformer_engine"]) == {"LogFp8TensorStats"}
    everything = load(combined_yaml([bad, watch]))
    off = [s for s in everything.values() if "DisableFP8GEMM" in s["transformer_engine"]]
    assert [s["layers"] for s in off] == [{"exact_layer_names": ["model.7.fc1"]}]


def test_a_layer_that_is_bad_on_one_rank_is_not_to_be_watched_on_another(tmp_path: Path) -> None:
    for rank, share in enumerate((4.0, 20.0)):
        write_records(tmp_path, lossy({"a": share}), rank)
    (piece,) = advice_on(tmp_path)
    assert piece.level is Level.BAD


def test_all_layers_are_named(tmp_path: Path) -> None:
    """The config does not say `layer_types: [all]`: another model or more layers may use it."""
    layers = [f"model.{i}.fc1" for i in range(30)]
    (piece,) = advice_on(write_records(tmp_path, lossy(dict.fromkeys(layers, 20.0))))
    assert section(piece)["layers"] == {"exact_layer_names": layers}
    assert piece.layers == layers


def test_most_urgent_comes_first(tmp_path: Path) -> None:
    verdicts = judge(read_run(write_run(tmp_path, blocks=8, steps=range(140, 300, 2), ailment=ill)))
    advice = advise(verdicts)
    assert [piece.level for piece in advice] == sorted((p.level for p in advice), reverse=True)
    assert headline(verdicts, advice) == "NaN in model.layers.7.layernorm_mlp.fc2 since step 276"
    assert [piece.findings[0].rule.name for piece in advice] == [
        "non-finite",
        "overflow",
        "underflow",
        "dead",
        "underflow",  # other layers, to be watched
        "growth",
    ]
    names = [next(iter(load(piece.yaml))) for piece in advice]
    assert len(set(names)) == len(names)  # one file can hold all sections
    load(combined_yaml(advice))


def test_combined_config_has_each_layer_once(tmp_path: Path) -> None:
    lost = {"x": ("activation", "gradient"), "y": ("gradient",), "z": ("activation", "gradient")}
    records = [
        record(i, layer, tensor, "underflows%", 20.0)
        for layer, tensors in lost.items()
        for tensor in tensors
        for i in range(40)
    ]
    records += [record(i, "w", "weight", "underflows%", 20.0) for i in range(40)]
    records += [record(40, "w", "gradient", "std", math.nan)]
    records += [record(40, "v", "gradient", "cur_amax", 1.0)]
    config = load(combined_yaml(advice_on(write_records(tmp_path, records))))
    acts = {
        tuple(sorted(s["layers"]["exact_layer_names"])): s["transformer_engine"]
        for s in config.values()
    }
    assert set(acts) == {("w",), ("x", "z"), ("y",)}
    assert set(acts["w",]) == {"DisableFP8Layer", "LogTensorStats"}  # all GEMMs are off
    assert acts["x", "z"]["DisableFP8GEMM"]["gemms"] == ["fprop", "dgrad", "wgrad"]
    assert acts["y",]["DisableFP8GEMM"]["gemms"] == ["dgrad", "wgrad"]


def test_gemms_in_high_precision_need_no_scaling() -> None:
    off = (["a", "b"], {"DisableFP8GEMM": {"gemms": ["fprop"]}})
    scaled = (
        ["a", "b"],
        {"PerTensorScaling": {"gemms": ["fprop", "wgrad"], "tensors": ["weight"]}},
    )
    hidden = (["b"], {"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["weight"]}})
    ((_, features),) = combine([off, scaled])
    assert features["PerTensorScaling"] == {"gemms": ["wgrad"], "tensors": ["weight"]}
    assert combine([off, hidden]) == [off]


def test_united_schedules_keep_what_each_piece_asked_for() -> None:
    narrow = {"enabled": True, "stats": ["max", "min"], "start_step": 5, "end_step": 9, "freq": 6}
    wide = {"enabled": True, "stats": ["min", "std"], "start_step": 3, "freq": 4}
    ((layers, features),) = combine([(["a"], {"Log": narrow}), (["a"], {"Log": wide})])
    assert layers == ["a"]
    assert features["Log"] == {
        "enabled": True,
        "stats": ["max", "min", "std"],
        "start_step": 3,
        "freq": 2,
    }


@pytest.mark.parametrize("tensor", ["activation", "weight", "gradient", "output", "dgrad", "wgrad"])
def test_all_that_can_be_wrong_with_a_tensor_loads(tmp_path: Path, tensor: str) -> None:
    series = {
        "underflows%": [50.0] * 40,
        "fp8_current_scaling_overflows%": [0.0] * 40,
        "overflows%": [50.0] * 40,
        "mse": [1.0] * 40,
        "std": [1.0] * 40,
        "cur_amax": [1.0] * 20 + [1e6] * 20,
        "dynamic_range": [60.0] * 40,
        "l2_norm": [0.0] * 40,
        "mean": [1.0] * 39 + [math.inf],
    }
    records = [
        record(i, layer, tensor, name, value)
        for layer in ("a.fc1", "on", "b: c")
        for name, values in series.items()
        for i, value in enumerate(values)
    ]
    advice = advice_on(write_records(tmp_path, records))
    assert len(advice) >= 3
    for piece in advice:
        section(piece)
    load(combined_yaml(advice))


def test_healthy_run_has_none(tmp_path: Path) -> None:
    verdicts = judge(read_run(write_run(tmp_path, blocks=1)))
    assert advise(verdicts) == []
    assert verdicts.level is Level.OK
    assert headline(verdicts, []) == "Nothing stands out in 4 layers"


@pytest.mark.parametrize("name", ["a.b-0_c", "on", "1e3", "x: y", 'q"', "- #", "*a", "ü", "null"])
def test_names_survive_yaml(name: str) -> None:
    config = {"s": {"layers": [name, "b"], "long": [name] * 30, name: {"enabled": True, "n": 3}}}
    text = to_yaml(config)
    assert yaml.safe_load(text) == config
    assert _engine.parse_yaml(text.encode(), "names.yaml") == config


@pytest.mark.parametrize("layer", ["model.\U0001f680.fc1", "\x85\u2028", "a\\ud83d\\ude80"])
def test_names_beyond_ascii_are_escaped_as_yaml_does(tmp_path: Path, layer: str) -> None:
    (piece,) = advice_on(write_series(tmp_path, [20.0] * 3, statistic="underflows%", layer=layer))
    (section,) = load(piece.yaml).values()
    assert section["layers"]["exact_layer_names"] == [layer]


def test_a_scalar_of_the_program_has_no_layer_to_act_on(tmp_path: Path) -> None:
    rows = [{**record(0, "", "", "", v), "name": n} for n, v in (("loss", math.nan), ("lr", 1.0))]
    (piece,) = pieces = advice_on(write_records(tmp_path, rows))
    assert piece.title == "NaN in loss since step 0"
    assert (piece.yaml, combined_yaml(pieces)) == ("", "")
