"""Writes log directories of made-up training runs, healthy or with chosen faults."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

LAYERS_OF_BLOCK = (
    "self_attention.layernorm_qkv",
    "self_attention.proj",
    "layernorm_mlp.fc1",
    "layernorm_mlp.fc2",
)
TENSORS = ("activation", "weight", "gradient")
STATISTICS = ("cur_amax", "std", "dynamic_range", "underflows%", "overflows%", "mse")
GEMMS = {
    "activation": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
}
Ailment = Callable[[str, str, str, int, float], float | None]


def record(iteration: int, layer: str, tensor: str, statistic: str, value: float | None) -> dict:
    spelt = value if value is None or math.isfinite(value) else str(value)
    return {
        "iteration": iteration,
        "layer": layer,
        "tensor": tensor,
        "statistic": statistic,
        "name": f"{layer}_{tensor}_{statistic}",
        "value": spelt,
        "rank": 0,
    }


def write_records(logdir: Path, records: list[dict], rank: int = 0, tail: str = "") -> Path:
    logdir.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps({**r, 'rank': rank})}\n" for r in records)
    (logdir / f"statistics_rank-{rank}.jsonl").write_text(lines + tail)
    return logdir


def write_series(logdir: Path, values: list[float | None], **where: str) -> Path:
    """Writes one series: values of steps 0, 1, ...; `where` may name layer, tensor, statistic."""
    at = {"layer": "model.0.fc1", "tensor": "gradient", "statistic": "cur_amax", **where}
    return write_records(logdir, [record(i, value=v, **at) for i, v in enumerate(values)])


def layer_names(blocks: int) -> list[str]:
    return [f"model.layers.{b}.{part}" for b in range(blocks) for part in LAYERS_OF_BLOCK]


def healthy(layer: int, tensor: str, statistic: str, step: int) -> float:
    """Returns a plausible value of a healthy run."""
    part = (1.0, 1.25, 0.8, 1.1)[layer % len(LAYERS_OF_BLOCK)]
    drift = 0.7 + part / (1 + step / 80) + random.uniform(-0.05, 0.05)
    size = {"activation": 1.0, "weight": 0.04, "gradient": 3e-4}[tensor] * part * (1 + layer / 40)
    return {
        "cur_amax": 6 * size * drift,
        "std": size * drift,
        "dynamic_range": (16 if tensor == "gradient" else 13) + drift,
        "underflows%": 0.3 * drift * (1 + layer / 30),
        "overflows%": max(0.0, 0.02 * drift - 0.02),
        "mse": size**2 * 1e-3 * drift,
    }[statistic]


def write_run(
    logdir: Path, blocks: int = 2, steps: range = range(20), ailment: Ailment | None = None
) -> Path:
    """Writes a run of a transformer.

    `ailment(layer, tensor, statistic, step, value)` returns the value to write.
    """
    names = layer_names(blocks)
    records = []
    for step in steps:
        for i, layer in enumerate(names):
            for tensor in TENSORS:
                for statistic in STATISTICS:
                    value: float | None = healthy(i, tensor, statistic, step)
                    if ailment:
                        value = ailment(layer, tensor, statistic, step, value)
                    records.append(record(step, layer, tensor, statistic, value))
    plan = "".join(
        f"2026-01-01 00:00:00,000 - INFO - {layer}: Tensor: {tensor}, gemm {gemm} - "
        f"{'High precision' if layer == names[0] and gemm == 'fprop' else 'FP8 quantization'}\n"
        for layer in names
        for tensor in TENSORS
        for gemm in GEMMS[tensor]
    )
    messages = logdir / "nvdlfw_inspect_logs"
    messages.mkdir(parents=True)
    (messages / "nvdlfw_inspect_globalrank-0.log").write_text(plan)
    return write_records(logdir, records)


def ill(layer: str, tensor: str, statistic: str, step: int, value: float) -> float | None:
    """Alters values: underflow that spreads, overflow, a jump, a zero weight, a NaN."""
    block = int(layer.split(".")[2])
    part = layer.split(".", 3)[3]
    if tensor == "gradient" and part == "layernorm_mlp.fc1" and block >= 3:
        if statistic == "underflows%":
            return value + 0.05 * (block - 2) * max(0, step - 60) / 2
        if statistic == "dynamic_range":
            return value + 0.03 * max(0, step - 60)
    if tensor == "activation" and layer.endswith("5.layernorm_mlp.fc2") and step >= 150:
        if statistic == "cur_amax":
            return value * 2 ** min(9, (step - 150) / 2)
        if statistic == "overflows%":
            return value + min(9.0, 0.4 * (step - 150))
    if layer.endswith("1.self_attention.proj") and tensor == "weight" and statistic == "cur_amax":
        return 0.0 if step > 100 else value
    if block >= 6 and tensor == "gradient" and step >= 290 - 2 * block:
        return math.nan
    return value
