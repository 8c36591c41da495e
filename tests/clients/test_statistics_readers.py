"""How other trainers use the debugger: with their loggers, and parsers of its text logs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine
import transformer_engine.pytorch as te
from nvdlfw_inspect.logging import BaseLogger

# Patterns of analysis scripts: a line of the statistics log, and a line that names a layer.
STATISTIC = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - INFO - (\S+)\s+iteration=(\d+)\s+value=([\d.]+)$"
)
ASSIGNED = re.compile(r"Assigned layer name: (\S+)")
CONFIG = """
stats:
  enabled: True
  layers: {layer_name_regex_pattern: ".*layers.0.*"}
  transformer_engine:
    LogFp8TensorStats: {enabled: True, tensors: [activation, gradient], stats: [underflows%]}
"""


class Recorder(BaseLogger):
    """A trainer's logger, which stores each scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float, int]] = []

    def log_scalar(self, name: str, value: float, iteration: int, **kwargs: object) -> None:
        self.seen.append((name, value, iteration))


@pytest.fixture(autouse=True)
def _session_ends() -> Iterator[None]:
    yield
    debug_api.end_debug()


def test_loggers_and_parsers_of_trainers(device: str, tmp_path: Path) -> None:
    (tmp_path / "stats.yaml").write_text(CONFIG)
    recorder = Recorder()
    debug_api.initialize(
        config_file=str(tmp_path / "stats.yaml"),
        feature_dirs=[str(Path(transformer_engine.__file__).parent / "debug" / "features")],
        log_dir=str(tmp_path),
        statistics_logger=recorder,
        init_training_step=5,
        default_logging_enabled=True,
    )
    model = nn.Module()
    model.layers = nn.ModuleList(te.Linear(16, 16, device=device) for _ in range(2))
    debug_api.infer_and_assign_layer_names([model])
    debug_api.set_tensor_reduction_group(None)
    for _ in range(2):
        x = torch.randn(16, 16, device=device, requires_grad=True)
        with te.fp8_autocast():
            for layer in model.layers:
                x = layer(x)
        x.sum().backward()
        debug_api.step()
    debug_api.end_debug()
    file = "nvdlfw_inspect_globalrank-0.log"
    lines = (tmp_path / "nvdlfw_inspect_statistics_logs" / file).read_text().splitlines()
    parsed = [match.groups() for line in lines if (match := STATISTIC.match(line))]
    assert len(parsed) == len(lines) == 2 * 2
    assert {(name, int(step)) for name, step, _ in parsed} == {
        (name, step) for name, _, step in recorder.seen
    }
    assert {name.split("_")[-1] for name, _, _ in parsed} == {"underflows%"}
    assert {int(step) for _, step, _ in parsed} == {5, 6}
    text = (tmp_path / "nvdlfw_inspect_logs" / file).read_text()
    assert any("layers.0" in name for name in ASSIGNED.findall(text))
