"""Cases of debugger sessions: the files that they write, and the results of the layers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from comparison.bench import FEW_RECIPES, PRECISIONS, RECIPES, Bench, Case, Row, pairwise
from comparison.training import WRAPS

STEPS = 4
STATISTICS = """
statistics:
  enabled: True
  layers: {layer_types: [all]}
  transformer_engine:
    LogTensorStats:
      enabled: True
      freq: FREQ
      tensors_struct:
        - tensor: activation
          stats: [min, max, mean, std, l1_norm, l2_norm, cur_amax, dynamic_range]
        - {tensor: gradient, stats: [mean, std, l2_norm]}
        - {tensor: weight, stats: [cur_amax, l1_norm], start_step: 1}
        - {tensor: output, stats: [mean, max]}
        - {tensor: dgrad, stats: [l2_norm]}
        - {tensor: wgrad, stats: [l2_norm, min]}
    LogFp8TensorStats:
      enabled: True
      freq: FREQ
      tensors: [activation, weight, gradient]
      stats:
        - underflows%
        - overflows%
        - mse
        - mse_columnwise
        - scale_inv_min
        - fp8_current_scaling_underflows%
        - fp8_block_scaling_mse
        - mxfp8_mse
"""
ROUTES = """
high_precision_gemms:
  enabled: True
  layers: {layer_name_regex_pattern: ".*(proj|fc2)$"}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [dgrad, wgrad]}
a_layer_in_high_precision:
  enabled: True
  layers: {layer_types: [qkv]}
  transformer_engine:
    DisableFP8Layer: {enabled: True}
"""
CHANGES = """
other_scales:
  enabled: True
  layers: {layer_types: [fc1, qkv]}
  transformer_engine:
    PerTensorScaling:
      enabled: True
      gemms_struct:
        - {gemm: fprop, tensors: [activation, weight]}
        - gemm: dgrad
          tensors_struct: [{tensor: gradient, margin: 1}, {tensor: weight}]
fake_casts:
  enabled: True
  layers: {layer_types: [fc2, proj]}
  transformer_engine:
    FakeQuant:
      enabled: True
      quant_format: FORMAT
      gemms_struct:
        - {gemm: fprop, tensors: [activation, weight, output]}
        - {gemm: wgrad, tensors: [gradient]}
"""
DUMPS = """
dumps:
  enabled: True
  layers: {layer_types: [fc1, qkv]}
  transformer_engine:
    DumpTensors:
      enabled: True
      tensors: [activation, gradient]
      high_precision_tensor: True
      quantized_tensor: True
      freq: 3
"""
CONFIGURATIONS = {
    "statistics": STATISTICS.replace("FREQ", "1"),
    "statistics of some steps": STATISTICS.replace("FREQ", "2"),
    "routes": ROUTES,
    "changes": CHANGES.replace("FORMAT", "FP8E4M3"),
    "changes to MXFP8": CHANGES.replace("FORMAT", "MXFP8E5M2"),
    "statistics, routes": STATISTICS.replace("FREQ", "3") + ROUTES,
    "statistics, changes": STATISTICS.replace("FREQ", "1") + CHANGES.replace("FORMAT", "FP8E5M2"),
    "dumps": DUMPS,
}


def _build(kind: str, **more: Any) -> nn.Module:
    if kind == "LayerNormMLP":
        return te.LayerNormMLP(64, 96, name="layer.mlp", **more)
    if kind == "GroupedLinear":
        return te.GroupedLinear(2, 64, 64, name="layer.fc1", **more)
    more |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
    return te.TransformerLayer(64, 96, 4, name="layer", **more)


def _add_logs(bench: Bench, folder: Path) -> None:
    """Add every file that a session wrote; paths and times are removed from texts."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        name = f"files/{path.relative_to(folder)}"
        if path.suffix == ".pt":
            bench.found.add(name, torch.load(path, weights_only=True))
        else:
            text = path.read_text().replace(str(folder.parent), "PLACE")
            bench.found.add_text(name, re.sub(r"[\d.]+ s of host time", "host time", text))


def _inspect(bench: Bench, row: Row) -> None:
    precision, recipe = PRECISIONS[row["precision"]], RECIPES[row["recipe"]]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        configuration = folder / "config.yaml"
        configuration.write_text(CONFIGURATIONS[row["features"]])
        debug_api.initialize(str(configuration), log_dir=str(folder / "log"), log_timestamps=False)
        try:
            more = {"device": bench.device, "params_dtype": precision.dtype}
            module = _build(row["module"], **more)
            for step in range(STEPS):
                x = bench.tensor(int(row["tokens"]), 2, 64, dtype=precision.dtype, grad=True)
                splits = ([x.shape[0], x.shape[0]],) if row["module"] == "GroupedLinear" else ()
                with bench.scope(precision, recipe):
                    if row["wrap"] == "called":
                        out = module(x, *splits)
                    else:
                        run = lambda x, splits=splits: module(x, *splits)  # noqa: E731
                        out = WRAPS[row["wrap"]](run, x)
                out.backward(bench.like(out))
                bench.found.add(f"step{step}", [out, x.grad])
                bench.found.add(
                    f"step{step}.gradient", {n: p.grad for n, p in module.named_parameters()}
                )
                debug_api.step()
        finally:
            debug_api.end_debug()
        _add_logs(bench, folder / "log")


def cases() -> Iterator[Case]:
    """The cases of this file."""
    factors = {
        "module": ("TransformerLayer", "LayerNormMLP", "GroupedLinear"),
        "features": tuple(CONFIGURATIONS),
        "recipe": (*FEW_RECIPES, "fp8 attention"),
        "precision": ("bf16", "fp32", "autocast bf16"),
        "tokens": ("16", "13"),
        "wrap": ("called", "te, not reentrant", "torch"),
    }

    def makes_sense(row: Row) -> bool:
        return row["module"] == "TransformerLayer" or row["recipe"] != "fp8 attention"

    for row in pairwise(factors, makes_sense):
        yield Case("/".join(("inspected", *row.values())), lambda b, row=row: _inspect(b, row))
