"""An infinite gradient saturates when cast to FP8 (docs/concepts.md); the debugger shows it."""

import json
import math
from pathlib import Path

import pytest
import torch

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

CONFIG = {
    "gradients": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {
            "LogTensorStats": {"enabled": True, "tensors": ["gradient"], "stats": ["max"]}
        },
    }
}


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_the_weights_gradient_is_finite_and_the_statistic_is_not(
    recipe: type[Recipe], tmp_path: Path
) -> None:
    debug_api.initialize(CONFIG, log_dir=tmp_path)
    try:
        layer = te.Linear(128, 128, device="cpu", name="fc")
        with te.fp8_autocast(fp8_recipe=recipe()):
            y = layer(torch.randn(128, 128, requires_grad=True))
        gradient = torch.ones_like(y)
        gradient[3, 5] = math.inf
        y.backward(gradient)
        debug_api.step()
    finally:
        debug_api.end_debug()
    assert layer.weight.grad.isfinite().all()
    assert not layer.bias.grad.isfinite().all()
    lines = [
        json.loads(line)
        for file in tmp_path.rglob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert [line["value"] for line in lines if line["statistic"] == "max"] == ["inf"]
