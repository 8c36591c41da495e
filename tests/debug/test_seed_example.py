"""The documented example: a TransformerLayer, a config with two sections, and the logs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.pytorch import TransformerLayer

CONFIG = """
fc1_fprop_to_fp8:
  enabled: True
  layers:
    layer_types: [fc1, fc2] # contains fc1 or fc2 in name
  transformer_engine:
    DisableFP8GEMM:
      enabled: True
      gemms: [fprop]

log_tensor_stats:
  enabled: True
  layers:
    layer_types: [layernorm_linear] # contains layernorm_linear in name
  transformer_engine:
    LogTensorStats:
      enabled: True
      stats: [max, min, mean, std, l1_norm]
      tensors: [activation]
      freq: 1
      start_step: 2
      end_step: 5
"""
SIDES = (
    ("activation", "fprop"),
    ("activation", "wgrad"),
    ("weight", "fprop"),
    ("weight", "dgrad"),
    ("gradient", "dgrad"),
    ("gradient", "wgrad"),
)
LAYERS = (
    "self_attention.layernorm_qkv",
    "self_attention.proj",
    "layernorm_mlp.fc1",
    "layernorm_mlp.fc2",
)
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - "


@pytest.fixture(autouse=True)
def _session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    debug_api.end_debug()


def train(device: str) -> None:
    """The documented script, with another device and path."""
    hidden_size, num_attention_heads = 512, 8
    debug_api.initialize(
        config_file="./config.yaml",
        feature_dirs=[str(Path(te.__file__).parents[1] / "debug" / "features")],
        log_dir="./log",
        default_logging_enabled=True,
    )
    transformer_layer = TransformerLayer(
        hidden_size=hidden_size,
        ffn_hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        name="transformer_layer",
    ).to(device)
    dummy_input = torch.randn(10, 32, hidden_size).to(device)
    criterion = nn.MSELoss()
    optimizer = optim.Adam(transformer_layer.parameters(), lr=1e-4)
    dummy_target = torch.randn(10, 32, hidden_size).to(device)

    for _epoch in range(5):
        transformer_layer.train()
        optimizer.zero_grad()
        with te.fp8_autocast(enabled=True):
            output = transformer_layer(dummy_input)
        loss = criterion(output, dummy_target)
        loss.backward()
        optimizer.step()
        debug_api.step()


def lines(folder: str) -> list[str]:
    text = Path("log", folder, "nvdlfw_inspect_globalrank-0.log").read_text()
    found = [re.fullmatch(rf"{STAMP}(.*)", line) for line in text.splitlines()]
    assert all(found)
    return [match[1] for match in found]


def test_logs_are_those_of_the_document(device: str) -> None:
    Path("config.yaml").write_text(CONFIG)
    train(device)
    debug_api.end_debug()
    plans = [
        f"INFO - transformer_layer.{layer}: Tensor: {tensor}, gemm {gemm} - "
        + ("High precision" if "fc" in layer and gemm == "fprop" else "FP8 quantization")
        for layer in LAYERS
        for tensor, gemm in SIDES
    ]
    debug = lines("nvdlfw_inspect_logs")
    assert debug[: 3 + len(plans)] == [
        "INFO - Default logging to file enabled at ./log",
        "INFO - Reading config from ./config.yaml.",
        "INFO - Loaded configs for dict_keys(['fc1_fprop_to_fp8', 'log_tensor_stats']).",
        *plans,
    ]


def test_statistics_are_those_of_the_document(device: str) -> None:
    Path("config.yaml").write_text(CONFIG)
    train(device)
    debug_api.end_debug()
    name = "transformer_layer.self_attention.layernorm_qkv"
    looks = f"INFO - {name}: Feature=LogTensorStats, API=look_at_tensor_before_process: activation"
    assert looks in lines("nvdlfw_inspect_logs")
    statistics = lines("nvdlfw_inspect_statistics_logs")
    values = {}
    expected = [(i, s) for i in (2, 3, 4) for s in ("max", "min", "mean", "std", "l1_norm")]
    for line, (iteration, statistic) in zip(statistics, expected, strict=True):
        tabs = " \t\t\t\t "
        head = f"INFO - {name}_activation_{statistic}{tabs}iteration={iteration:06d}{tabs}value="
        assert line.startswith(head)
        values[iteration, statistic] = float(line.removeprefix(head))
    # The output of a LayerNorm has mean 0 and deviation 1; the mean of |x| is sqrt(2 / pi).
    assert abs(values[2, "mean"]) < 1e-3
    assert values[2, "std"] == pytest.approx(1, abs=0.01)
    assert values[2, "l1_norm"] == pytest.approx(10 * 32 * 512 * 0.798, rel=0.01)
    assert 3.5 < values[2, "max"] < 6 and -6 < values[2, "min"] < -3.5
