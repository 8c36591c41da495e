"""`nvdlfw_inspect check`: problems in a config, its plan, and the layers of a model it selects."""

import subprocess
import sys
from pathlib import Path

import pytest

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.__main__ import main

FEATURE = '''
from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method


@Registry.register_feature(namespace="transformer_engine")
class CheckedFeature:
    """For the test of `check`."""

    CONFIG = FeatureConfig(tensors=("activation", "weight"), scheduled=True)

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration):
        """Does nothing."""
'''
CONFIG = """
watched:
  enabled: True
  layers: {layer_types: [LAYERS]}
  transformer_engine:
    CheckedFeature:
      enabled: True
      tensors_struct:
      - {tensor: activation, freq: 10, start_step: 5, end_step: 100}
      - {tensor: weight, start_end_list: [[0, 20], [80, -1]]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "checked.py").write_text(FEATURE)
    return tmp_path


def check(folder: Path, config: str, *arguments: str) -> int:
    (folder / "config.yaml").write_text(config)
    features = ["--feature-dirs", str(folder / "features")]
    return main(["check", str(folder / "config.yaml"), *arguments, *features])


def test_prints_what_a_configuration_would_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder, CONFIG) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder / 'config.yaml'}: valid, 1 of 1 section enabled",
        "",
        "watched:",
        "  CheckedFeature",
        "    activation: every 10 steps, 5 to 100",
        "    weight: every step, 0 to 20 and from 80 on",
    ]


def test_reports_every_mistake_with_its_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = CONFIG.replace("freq: 10", "freq: 0").replace("tensor: weight", "tensor: wieght")
    assert check(folder, broken) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    place = f"error: {folder / 'config.yaml'}"
    path = "watched.transformer_engine.CheckedFeature.tensors_struct"
    errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert errors == [
        f"{place}:9:36: {path}[0].freq: expected an integer of at least 1, got 0",
        f"{place}:10:18: {path}[1].tensor: expected one of activation, weight, got 'wieght'; "
        "did you mean 'weight'?",
    ]


def test_what_is_no_yaml_is_reported_with_its_place_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder, "watched:\n\tenabled: True\n") == 1
    error = f"error: {folder / 'config.yaml'}:2:1: expected spaces, got a tab"
    assert error in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("layers", "selected"),
    [
        ("fc1", ["model.0.layernorm_mlp.fc1"]),
        ("layernorm_linear", ["model.0.self_attention.layernorm_qkv"]),
        ("gemm_1", ["model.1.gemm_1"]),
        ("nothing", []),
    ],
)
def test_names_the_layers_of_a_model(
    folder: Path,
    layers: str,
    selected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    (folder / "checked_model.py").write_text(
        "import torch\nimport transformer_engine.pytorch as te\n"
        "def build():\n    layer = te.TransformerLayer(32, 64, 2, device='meta')\n"
        "    return torch.nn.Sequential(layer, te.GroupedLinear(2, 32, 32, device='meta'))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    config = CONFIG.replace("LAYERS", layers)
    assert check(folder, config, "--model", "checked_model:build") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[2] == f"watched: {len(selected)} of 6 layers"
    assert [line.strip() for line in lines[3 : 3 + len(selected)]] == selected
    assert ("section watched: layer_types [nothing] selects no layer" in captured.err) == (
        not selected
    )
    at = lines.index("the model: 6 layers")
    assert "    model.0.self_attention.proj" in lines[at:]


def test_misspelt_layers_are_suggested_as_in_a_training(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (folder / "suggested_model.py").write_text(
        "import transformer_engine.pytorch as te\n"
        "def build():\n    return te.LayerNormMLP(32, 64, name='mlp', device='meta')\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    arguments = (CONFIG.replace("LAYERS", "fc3"), "--model", "suggested_model:build")
    assert check(folder, *arguments) == 0
    warning = "section watched: layer_types [fc3] selects no layer; did you mean mlp.fc1, mlp.fc2?"
    assert f"warning: {warning}\n" in capsys.readouterr().err
    assert check(folder, *arguments, "--strict") == 1


def test_warnings_are_mistakes_where_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unused = BUILT_IN.replace("tensors: [gradient]", "tensors: [weight]")
    assert check(folder, unused) == 0
    assert check(folder, unused, "--strict") == 1
    assert capsys.readouterr().err.endswith("config.yaml: 1 mistake\n")
    assert check(folder, BUILT_IN, "--strict") == 0


def test_problems_show_their_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, CONFIG.replace("tensor: weight", "tensor: wéight")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "          - {tensor: wéight, start_end_list: [[0, 20], [80, -1]]}"
    assert lines[2].index("^") == lines[1].index("wéight")


def test_a_session_shows_the_line_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.yaml").write_text("a:\n  enabled: yes\n   layers: {layer_types: all}\n")
    with pytest.raises(ValueError, match="a line indented by 3") as caught:
        debug_api.initialize(tmp_path / "config.yaml", log_dir=tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "       layers: {layer_types: all}",
        "             ^",
    ]


TWICE = """
first:
  enabled: True
  layers: {layer_types: [fc]}
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [activation], stats: [max]}
    FakeQuant: {enabled: True, gemms: [fprop], tensors: [activation], quant_format: E4M3}
second:
  enabled: True
  layers: {layer_types: [fc2, proj]}
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [activation, weight], stats: [min]}
    PerTensorScaling: {enabled: True, gemms: [fprop], tensors: [activation, weight]}
"""


def test_sections_that_clash_on_a_layer_of_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (folder / "clashing_model.py").write_text(
        "import torch, transformer_engine.pytorch as te\n"
        "def build():\n"
        "    layers = (te.TransformerLayer(32, 64, 2, device='meta') for _ in range(2))\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    assert check(folder, TWICE) == 0  # the layers are not known
    assert check(folder, TWICE, "--model", "clashing_model:build") == 1
    errors = sorted(
        line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")
    )
    where = "on layer model.0.layernorm_mlp.fc2, tensor activation"
    end = f"give the sections different layers ({folder / 'config.yaml'})"
    together = f"got both: put the statistics in one section, or {end}"
    fake, scaled = "FakeQuant of section first", "PerTensorScaling of section second"
    logs = [f"LogTensorStats of section {name}" for name in ("first", "second")]
    assert errors == [
        f"error: expected one of {fake} and {scaled} {where}, gemm fprop, got both: {end}",
        f"error: expected one of {logs[0]} and {logs[1]} {where}, {together}",
    ]
    disjoint = TWICE.replace("fc2, proj", "proj")
    assert check(folder, disjoint, "--model", "clashing_model:build") == 0


@pytest.mark.parametrize(
    "model",
    [
        "no_colon",
        "no_name:",
        "../a_path.py:build",
        "no_such_module:build",
        "json:no_such_function",
        "os:getcwd",
    ],
)
def test_an_unusable_argument_exits_with_2(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder, CONFIG, "--model", model) == 2
    problem = capsys.readouterr().err
    expected = "check: expected os:getcwd to return a torch.nn.Module, got "
    assert problem.startswith(expected if model == "os:getcwd" else "check: ")
    missing = str(folder / "missing.yaml")
    assert main(["check", missing]) == 2
    assert capsys.readouterr().err == f"check: {missing}: No such file or directory\n"
    assert main(["check", str(folder / "config.yaml"), "--feature-dirs", missing]) == 2
    expected = f'check: expected a directory with feature files, got "{missing}"'
    assert capsys.readouterr().err.startswith(expected)


BUILT_IN = """
projection:
  enabled: True
  layers: {layer_types: [proj]}
  transformer_engine:
    DisableFP8Layer: {enabled: True}
backward:
  enabled: True
  layers: {exact_layer_names: [model.0.fc1]}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [dgrad, wgrad]}
    FakeQuant:
      enabled: True
      quant_format: FP8E4M3
      gemms_struct:
      - {gemm: dgrad, tensors: [gradient, weight]}
      - {gemm: wgrad, tensors: [gradient]}
later:
  enabled: False
  layers: {layer_types: [all]}
  transformer_engine:
    DisableFP8Layer: {enabled: True}
"""


def test_gathers_what_has_one_schedule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert check(folder, BUILT_IN) == 0
    assert capsys.readouterr().out.split("enabled\n")[1].splitlines() == [
        "",
        "projection:",
        "  DisableFP8Layer",
        "    all: every step",
        "",
        "backward:",
        "  DisableFP8GEMM",
        "    dgrad, wgrad: every step",
        "  FakeQuant",
        "    weight, gradient in dgrad: every step",
        "    gradient in wgrad: every step",
        "",
        "later: disabled",
    ]


FACTORY = """
import train_gpt
from gpt.model import build_model


def build():
    options = train_gpt.make_parser().parse_args(["--device", "cpu"])
    return build_model(train_gpt.settings_of(options))
"""


def test_the_example_selects_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "factory_of_example.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    example = Path(__file__).parents[2] / "examples" / "config.yaml"
    config = tmp_path / "config.yaml"
    config.write_text(example.read_text().replace("enabled: False", "enabled: True"))
    assert main(["check", str(config), "--model", "factory_of_example:build"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith(f"{config}: valid, 3 of 3 sections enabled\n")
    assert "statistics_of_all_layers: 9 of 9 layers\n    layer1.self_" in captured.out
    assert "fp8_health_of_the_mlp: 4 of 9 layers\n" in captured.out
    assert "head_without_fp8: 1 of 9 layers\n    head\n" in captured.out  # the name in training


def test_an_empty_configuration_is_valid(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, "") == 0
    assert capsys.readouterr().out == f"{folder / 'config.yaml'}: valid, no sections\n"


INDENTED = """
watched:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    CheckedFeature:
      enabled: True
      tensors: [weight]
"""


@pytest.mark.parametrize(
    ("written", "instead", "place"),
    [
        ("      ", "    ", "7:5: watched.transformer_engine.CheckedFeature: "),
        ("    Ch", "  Ch", "6:3: watched.transformer_engine: "),
        ("    la", "  la", "4:3: watched.layers: "),
        ("\n  ", "\n", "2:1: watched: "),
    ],
    ids=["feature", "namespace", "layers", "section"],
)
def test_keys_that_are_not_indented_are_one_mistake(
    folder: Path, capsys: pytest.CaptureFixture[str], written: str, instead: str, place: str
) -> None:
    assert check(folder, INDENTED) == 0
    assert check(folder, INDENTED.replace(written, instead)) == 1
    told, *more = (line for line in capsys.readouterr().err.splitlines() if "error: " in line)
    assert f"{place}expected keys in it, indented deeper than its name, got none" in told
    assert not more


def test_a_long_line_is_shown_around_the_mistake(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "  layers: {layer_types: [" + "fc1, " * 60 + "fc2]}\n"
    assert check(folder, f"watched:\n  enabled: True\n{long[:-3]} fc2}}\n") == 1
    told, line, caret = capsys.readouterr().err.splitlines()[:3]
    assert "no ] that closes the [ of line 3, column 25" in told
    assert line[caret.index("^")] == "}" and len(line) < 130


def test_other_spellings_of_features_are_suggested_but_not_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(folder, CONFIG.replace("CheckedFeature", "FakeQuantFp9"))
    told = capsys.readouterr().err
    assert "did you mean 'FakeQuantFp8'?" in told
    assert "FakeQuant, LogFp8TensorStats, LogTensorStats" in told


def test_without_torch_a_file_is_not_called_wrong(folder: Path) -> None:
    body = "enabled: True, layers: {layer_types: [fc]}, transformer_engine: {LogTensorStats: {}}"
    file = folder / "config.yaml"
    file.write_text(f"stats: {{{body}}}")
    program = "import sys; sys.modules['torch'] = None; import nvdlfw_inspect.__main__ as m"
    command = [sys.executable, "-c", f"{program}; sys.exit(m.main())", "check", str(file)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 2 and "error:" not in found.stderr
    first, *_, last = found.stderr.splitlines()
    assert first.startswith("warning: transformer_engine.debug.features cannot be loaded: ")
    assert last == f"{file}: cannot be judged without the features that are missing"
