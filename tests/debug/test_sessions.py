"""Layers in complete sessions: documented configurations, and the GEMMs that result."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hook_cases import build, train
from precisions import RECIPES
from rulers import assert_equal

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from nvdlfw_inspect.registry import Registry
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from transformer_engine.pytorch.fp8.process_state import process_state

FEATURES = Path(te.__file__).parents[1] / "debug" / "features"
USER_FEATURE = '''
from nvdlfw_inspect.registry import Registry, api_method


@Registry.register_feature(namespace="transformer_engine")
class Halve:
    """Halves operands."""

    @api_method
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False

    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return tensor_name == "activation" and gemm == "fprop"

    @api_method
    def modify_tensor(self, config, tensor):
        return tensor * config["factor"]
'''
COUNTING_FEATURE = '''
from nvdlfw_inspect.base import FeatureConfig
from nvdlfw_inspect.registry import Registry, api_method


@Registry.register_feature(namespace="transformer_engine")
class CountCalls:
    """Counts its calls, which shows whether a layer still asks."""

    CONFIG = FeatureConfig(
        keys={"never": "bool"},
        tensors=("activation", "gradient", "weight", "output", "wgrad", "dgrad"),
        gemms=True,
    )

    def __init__(self):
        self.asked = self.called = 0

    @api_method
    def inspect_tensor_enabled(self, config):
        self.asked += 1
        return (False, None) if config.get("never") else True

    @api_method
    def inspect_tensor(self, config):
        self.called += 1
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    debug_api.end_debug()


def selected(layers: dict, **features: dict) -> dict:
    section = {name: {"enabled": True, **keys} for name, keys in features.items()}
    return {"section": {"enabled": True, "layers": layers, "transformer_engine": section}}


def start(config: dict, **more) -> None:
    debug_api.initialize(config, log_dir="log", **more)


def start_counting(init_training_step: int = 0, **keys):
    """Starts a session with the feature above on "layer"; returns the feature."""
    Path("features").mkdir()
    Path("features/count_calls.py").write_text(COUNTING_FEATURE)
    config = selected({"layer_types": ["layer"]}, CountCalls=keys)
    start(config, feature_dirs="features", init_training_step=init_training_step)
    return Registry.data["transformer_engine"].features["CountCalls"]


def log() -> str:
    debug_api.flush()
    (file,) = Path("log/nvdlfw_inspect_logs").iterdir()
    return file.read_text()


def kinds() -> set[tuple[str, str, str]]:
    return set(te.gemm_report(reset=True).counts)


FC1 = {"layer_types": ["fc1"]}
FP8_ELSEWHERE = {("layer.fc2", gemm, "fp8") for gemm in ("fprop", "dgrad", "wgrad")}


@pytest.mark.parametrize(
    ("feature", "keys", "high_precision"),
    [
        ("DisableFP8GEMM", {"gemms": ["dgrad", "wgrad"]}, {"dgrad", "wgrad"}),
        ("DisableFp8Gemm", {"gemms": ["dgrad", "wgrad"]}, {"dgrad", "wgrad"}),
        ("DisableQuantizationGEMM", {"gemms": "fprop"}, {"fprop"}),
        ("DisableFP8Layer", {}, {"fprop", "dgrad", "wgrad"}),
        ("DisableFp8Layer", {}, {"fprop", "dgrad", "wgrad"}),
        ("DisableQuantizationLayer", {}, {"fprop", "dgrad", "wgrad"}),
        ("PerTensorScaling", {"margin": 1, "gemms": ["dgrad"], "tensors": ["weight"]}, set()),
        (
            "FakeQuant",
            {
                "quant_format": "FP8E5M2",
                "gemms_struct": [
                    {"gemm": "fprop", "tensors": ["activation", "weight"]},
                    {"gemm": "dgrad", "tensors": ["gradient"]},
                ],
            },
            {"fprop", "dgrad"},
        ),
        (
            "FakeQuantFp8",
            {"quant_format": "E4M3", "gemms": ["wgrad"], "tensors": ["activation"]},
            {"wgrad"},
        ),
    ],
)
def test_documented_features(feature: str, keys: dict, high_precision: set[str]) -> None:
    start(selected(FC1, **{feature: keys}))
    kinds()
    module = build("mlp", "cpu")
    train(module, RECIPES["delayed"], after_step=debug_api.step)
    gemms = {"fprop", "dgrad", "wgrad"}
    expected = {("layer.fc1", g, "bf16" if g in high_precision else "fp8") for g in gemms}
    assert kinds() == expected | FP8_ELSEWHERE
    debug_api.end_debug()
    train(module, RECIPES["delayed"], steps=1)
    assert {kind for _, _, kind in kinds()} == {"fp8"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("config", [None, selected({"layer_types": ["other"]}, DisableFP8Layer={})])
def test_losses_are_the_same_where_nothing_is_selected(recipe: str, config) -> None:
    expected = train(build("mlp", "cpu"), RECIPES[recipe])
    with pytest.warns(UserWarning) if config else _nothing():
        debug_api.initialize(config, log_dir="log")
        actual = train(build("mlp", "cpu"), RECIPES[recipe], after_step=debug_api.step)
    assert_equal(actual, expected)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_) -> None: ...


def test_session_begins_and_ends_around_modules_that_are_there() -> None:
    module = build("linear", "cpu")
    expected = train(module, RECIPES["current"], steps=1)
    for _ in range(2):
        start(selected({"layer_types": ["layer"]}, DisableFP8Layer={}))
        kinds()
        train(module, RECIPES["current"], steps=1, after_step=debug_api.step)
        assert {kind for _, _, kind in kinds()} == {"bf16"}
        debug_api.end_debug()
        assert process_state().inspector is None
    assert_equal(train(module, RECIPES["current"], steps=1), expected)


def test_users_feature_from_a_folder() -> None:
    Path("features").mkdir()
    Path("features/halve.py").write_text(USER_FEATURE)
    start(
        selected({"exact_layer_names": ["layer"]}, Halve={"factor": 0.5}),
        feature_dirs=["features", str(FEATURES)],
    )
    module = build("linear", "cpu")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    with torch.no_grad(), te.fp8_autocast():
        y = module(x)
    assert torch.equal(y, torch.nn.functional.linear(x / 2, module.weight, module.bias))
    text = log()
    assert "layer: Tensor: activation, gemm fprop - modify_tensor()" in text
    assert "layer: Tensor: weight, gemm fprop - High precision" in text


def test_an_error_in_a_users_feature_says_where() -> None:
    Path("features").mkdir()
    Path("features/halve.py").write_text(USER_FEATURE)
    config = selected({"exact_layer_names": ["layer"]}, Halve={})
    start(config, feature_dirs="features", init_training_step=1)
    with pytest.raises(RuntimeError, match="KeyError") as error:
        build("linear", "cpu")(torch.randn(16, 32, dtype=torch.bfloat16))
    for name in ("feature Halve", "layer layer", "tensor activation", "gemm fprop", "iteration 1"):
        assert name in str(error.value)


def test_names_of_a_model_are_inferred() -> None:
    start(selected({"layer_types": ["model.0"]}, DisableFP8Layer={}))
    model = torch.nn.Sequential(te.Linear(16, 16, device="cpu"), te.Linear(16, 16, device="cpu"))
    debug_api.infer_and_assign_layer_names(model)
    kinds()
    with torch.no_grad(), te.fp8_autocast():
        model(torch.randn(16, 16))
    assert kinds() == {("model.0", "fprop", "fp32"), ("model.1", "fprop", "fp8")}
    assert "model.1: Tensor: weight, gemm fprop - FP8 quantization" in log()


FORK_WHILE_A_THREAD_STEPS = """
import os, signal, sys, threading
import torch
import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from nvdlfw_inspect.logging import BaseLogger

torch.set_num_threads(1)  # children of torch lack its other threads, and wait for them
begun, over = threading.Event(), threading.Event()
class Slow(BaseLogger):
    def log_scalar(self, name, value, iteration, **kwargs):
        begun.set(), over.wait()

stats = {"LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max"]}}
layers = {"layer_name_regex_pattern": ".*"}
config = {"s": {"enabled": True, "layers": layers, "transformer_engine": stats}}
debug_api.initialize(config, log_dir=sys.argv[1], statistics_logger=Slow())
def call(name):
    te.Linear(32, 32, device="cpu", name=name)(torch.ones(16, 32))
call("first")
thread = threading.Thread(target=debug_api.step)
thread.start()
begun.wait()
if (child := os.fork()) == 0:
    signal.alarm(10)
    call("second")
    os._exit(0)
print(os.waitpid(child, 0)[1])
over.set()
thread.join()
"""


def test_layers_run_in_a_child_that_was_forked_while_a_thread_stepped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK_WHILE_A_THREAD_STEPS, str(tmp_path)]
    done = subprocess.run(
        command, cwd=FEATURES.parents[2], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_a_layer_that_wants_nothing_more_is_not_asked_again() -> None:
    tensors = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
    counts = start_counting(never=True, tensors=tensors, gemms=["fprop", "dgrad", "wgrad"])
    module = build("linear", "cpu")
    for first in (True, False, None):
        for _ in range(3):
            module(torch.randn(16, 32, dtype=torch.bfloat16), is_first_microbatch=first)
            debug_api.step()
    assert (counts.asked, counts.called) == (6, 0)


def test_the_training_step_may_be_set_back() -> None:
    counts = start_counting(tensors="activation", gemms="fprop", init_training_step=100)
    module, x = build("linear", "cpu"), torch.randn(16, 32, dtype=torch.bfloat16)
    for _ in range(2):
        module(x)
        debug_api.step()
    assert TEDebugState.debug_enabled and TEDebugState.get_iteration() == 102
    debug_api.initialize_training_step(3)
    module(x)
    assert TEDebugState.get_iteration() == 3
    debug_api.end_debug()
    assert not TEDebugState.debug_enabled and TEDebugState.get_iteration() == 0
    assert counts.called == 3


def test_calls_by_hand() -> None:
    start(selected(FC1, FakeQuant={"quant_format": "E4M3", "gemms": "fprop", "tensors": "weight"}))
    calls = debug_api.transformer_engine
    here = {"layer_name": "x.fc1", "tensor_name": "weight", "gemm": "fprop", "iteration": 0}
    assert calls.modify_tensor_enabled(**here)
    assert not calls.modify_tensor_enabled(**{**here, "layer_name": "x.fc2"})
    assert not calls.fp8_gemm_enabled(layer_name="x.fc1", gemm="fprop", iteration=0)
    assert calls.fp8_gemm_enabled(layer_name="x.fc2", gemm="fprop", iteration=0) == (True, None)
    x = torch.tensor([[1.0, 448.0]])
    assert torch.equal(calls.modify_tensor(tensor=x, default_quantizer=None, **here), x)
    with pytest.raises(ValueError, match="Cannot route API fp8_gemm_enabled: gemm is missing"):
        calls.fp8_gemm_enabled(layer_name="x.fc1", iteration=0)


def test_layers_that_share_a_name_are_told() -> None:
    """A name is reported once. A layer that replaces a deleted one is not reported."""
    start(selected({"layer_types": ["fc"]}, LogTensorStats={"tensors": "weight", "stats": "min"}))
    x = torch.randn(16, 32)
    for _ in range(2):
        te.Linear(32, 32, name="fc", device="cpu")(x)
        debug_api.step()
    assert "[names]" not in log()
    layers = [te.Linear(32, 32, name=name, device="cpu") for name in ("fc", "fc", "fc2", "other")]
    for _ in range(2):
        for layer in layers:
            layer(x)
        debug_api.step()
    found = [line for line in log().splitlines() if "[names] expected one layer of each" in line]
    assert len(found) == 1
    assert "WARNING - fc: " in found[0]


@pytest.mark.parametrize("writes", [True, False])
def test_features_that_write_into_what_they_are_shown_are_told(writes: bool) -> None:
    Path("features").mkdir()
    function = "mul_" if writes else "mul"
    code = USER_FEATURE.replace("tensor * config", f"tensor.{function}(config").replace(
        '["factor"]', '["factor"])'
    )
    Path("features/halve.py").write_text(code)
    start(selected({"layer_types": ["fc"]}, Halve={"factor": 0.5}), feature_dirs="features")
    layer, x = te.Linear(32, 32, name="fc", device="cpu"), torch.randn(16, 32)
    for _ in range(2):
        layer(x)
        debug_api.step()
    told = "[modify_tensor] expected features to leave the activation as it is"
    assert log().count(told) == int(writes)
