#!/usr/bin/env python3
"""Computes the time of a training step on 8 to 1,024 GPUs from collectives and measured rates.

    python tools/simulate_parallel.py   # writes tables into docs/explanation

The list of collectives comes from a run: a small layer runs once as one rank of a group whose other
ranks do not exist (torch's "fake" backend), and `te.parallel_report` returns the collectives that
it has started. The times of one GPU and of two GPUs are read from benchmarks/results. There are
also measured times of four GPUs, which a table compares with the computed ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import transformer_engine.pytorch as te
from transformer_engine.pytorch import capture

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/explanation/many_gpus_simulated.md"
RESULTS = ROOT / "benchmarks/results"

NODE = 8  # GPUs of a node, which NVLink connects
NVLINK = 370e9  # bytes/s that a GPU sends in all-gathers and reduce-scatters of a node, published
NETWORK = 40e9  # bytes/s of a GPU to other nodes: 400 Gbit/s less a fifth for protocols; assumed
GRADIENT_BYTES = 2  # bytes that are sent for the gradient of one weight
TP_SIZES = (1, 2, 4, 8)
GPUS = (8, 64, 256, 1024)
SMALL = 256  # hidden size of the layer that runs; bytes are proportional to it
TOKENS = (16, 2)


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, and of a batch of a tensor parallel group.

    Attributes:
        hidden, ffn: hidden sizes of the layer and of its MLP.
        seq, batch: tokens in a sequence, and sequences.
    """

    hidden: int
    ffn: int
    seq: int
    batch: int

    def __str__(self) -> str:
        return f"h{self.hidden} f{self.ffn} s{self.seq} b{self.batch}"

    @property
    def tokens(self) -> int:
        """Number of tokens of a tensor parallel group."""
        return self.seq * self.batch

    @property
    def weights(self) -> int:
        """Number of weights of the four attention projections and the MLP."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.ffn

    @property
    def flops(self) -> float:
        """Operations of forward and backward; causal attention counts half."""
        return 3.0 * self.tokens * (2 * self.weights + 2 * self.seq * self.hidden)


@dataclass(frozen=True)
class Precision:
    """How a layer runs.

    Attributes:
        name: name of the precision in the benchmarks.
        fp8: whether GEMMs run in FP8.
        weight_bytes: bytes per weight that `fully_shard` gathers.
    """

    name: str
    fp8: bool
    weight_bytes: int


@dataclass(frozen=True)
class Collective:
    """A collective of a layer; its size is relative to an activation, `tokens x hidden`.

    Attributes:
        label: layer, direction and kind of the collective.
        kind: `fp8`, or a dtype.
        share: bytes that pass a rank's link, per element of the whole activation.
        hidden: whether a GEMM runs at the same time.
    """

    label: str
    kind: str
    share: float
    hidden: bool


SHAPES = (Shape(4096, 16384, 4096, 4), Shape(8192, 28672, 4096, 1))
PRECISIONS = (Precision("bf16", False, 2), Precision("fp8 delayed", True, 1))


def schedule(ranks: int, fp8: bool) -> list[Collective]:
    """The collectives of a TransformerLayer with tensor and sequence parallelism, in order."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    layer = te.TransformerLayer(
        *(SMALL, 2 * SMALL, NODE),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
        device="cpu",
        name="layer",
    )
    te.parallelize(layer, mesh, sequence_parallel=True)
    x = torch.randn(*TOKENS, SMALL, dtype=torch.bfloat16)
    te.parallel_report(reset=True)
    before, capture.HOST_BOUND_BYTES = capture.HOST_BOUND_BYTES, -1  # as large layers run
    with te.fp8_autocast(enabled=fp8):
        y = layer(x.requires_grad_())
    y.sum().backward()
    capture.HOST_BOUND_BYTES = before
    report = te.parallel_report(reset=True)
    dist.destroy_process_group()
    return [*_collectives(report, ranks, x.numel() * ranks)]


def _collectives(report: Any, ranks: int, elements: int) -> Iterator[Collective]:
    for sent, (calls, size) in report.counts.items():
        others = ranks - 1 if sent.collective == "all-gather" else (ranks - 1) / ranks
        label = f"{sent.layer.removeprefix('layer.')}, {sent.direction} {sent.collective}"
        share = size / calls * others / elements
        for _ in range(calls):
            yield Collective(label, sent.kind, share, sent.overlapped)


def tensor_parallel_ms(collectives: list[Collective], shape: Shape, rate: float) -> float:
    """Milliseconds of all collectives, one after the other."""
    return sum(one.share * shape.tokens * shape.hidden / rate * 1e3 for one in collectives)


def sharded_ms(shape: Shape, weight_bytes: int, tp: int, gpus: int, compute: float) -> float:
    """Milliseconds that forward and backward of a layer wait for weights and gradients.

    While a layer computes, the weights of the next layer are all-gathered and, in the backward,
    gradients are reduce-scattered. Only the time beyond the computing counts as waiting. A third of
    the computing is in the forward.
    """
    copies = gpus // tp
    rate = NVLINK if gpus <= NODE else min(NVLINK, NETWORK * NODE / tp)
    a_byte = shape.weights / tp * (copies - 1) / copies / rate * 1e3
    forward = a_byte * weight_bytes - compute / 3
    backward = a_byte * (weight_bytes + GRADIENT_BYTES) - compute * 2 / 3
    return max(0.0, forward) + max(0.0, backward)


class Measured:
    """Measured milliseconds of a layer, forward and backward, from a file of benchmarks/results."""

    def __init__(self, name: str = "parallel") -> None:
        document = json.loads((RESULTS / f"{name}.json").read_text())
        self.gpu, self.rows = document["gpu"], document["rows"]

    def shared(self, shape: Shape, precision: str, ranks: int) -> float:
        """The time on `ranks` GPUs with tensor parallelism."""
        return float(self._row(shape, precision, ranks)["ms"])

    def one(self, shape: Shape, precision: str) -> float:
        """The time on one GPU, measured in the same run."""
        return 2 * float(self._row(shape, precision, 2)["share_ms"])

    def collectives(self, shape: Shape) -> float:
        """The time of all collectives of a layer in bf16 on two GPUs, one after the other."""
        return float(self._row(shape, "bf16", 2)["alone_ms"])

    def _row(self, shape: Shape, precision: str, ranks: int) -> dict[str, Any]:
        case, op = f"{shape} {precision}", f"layer, TP{ranks} + SP, forward + backward"
        return next(row for row in self.rows if row["case"] == case and row["op"] == op)


class Simulation:
    """Steps of a layer of one shape in one precision.

    Attributes:
        rate: bytes/s on two GPUs, from the time of the collectives without GEMMs.
        exposed: the share of the collectives' time that GEMMs did not hide on two GPUs: the time of
            two GPUs less half the time of one, divided by the time of the collectives.
    """

    def __init__(
        self,
        shape: Shape,
        precision: Precision,
        schedules: dict[tuple[int, bool], list[Collective]],
        measured: Measured,
    ) -> None:
        self.shape, self.precision, self.schedules = shape, precision, schedules
        self.alone = measured.one(shape, precision.name)
        in_bf16 = tensor_parallel_ms(schedules[2, False], shape, 1e9)
        self.rate = in_bf16 * 1e9 / measured.collectives(shape)
        self.measured, self.half = measured.shared(shape, precision.name, 2), self.alone / 2
        self.whole = tensor_parallel_ms(schedules[2, precision.fp8], shape, self.rate)
        self.exposed = max(0.0, self.measured - self.half) / self.whole

    def step(self, tp: int, gpus: int) -> tuple[float, float]:
        """Milliseconds of a layer if GEMMs hide all collectives, or as much as on two GPUs."""
        compute = self.alone / tp
        waited = 0.0
        if tp > 1:
            rate, own = self.rate if tp == 2 else NVLINK, self.schedules[tp, self.precision.fp8]
            waited = tensor_parallel_ms(own, self.shape, rate) * self.exposed
        shards = sharded_ms(self.shape, self.precision.weight_bytes, tp, gpus, compute)
        return compute + shards, compute + waited + shards

    def efficiency(self, tp: int, gpus: int) -> tuple[float, float]:
        """Speed-up by tensor parallelism divided by `tp`, for both cases of `step`."""
        best, found = self.step(tp, gpus)
        return self.alone / tp / best, self.alone / tp / found

    def tflops(self, tp: int, gpus: int) -> tuple[float, float]:
        """TFLOP/s of each GPU, for both cases of `step`."""
        best, found = self.step(tp, gpus)
        work = self.shape.flops / tp / 1e9
        return work / best, work / found


def tables(simulations: list[Simulation]) -> dict[str, str]:
    """The tables of the page, by name."""
    found = {}
    both = [simulations[0].schedules[8, fp8] for fp8 in (False, True)]
    lines = ["| collective | moves, bf16 | moves, FP8 | under a GEMM |", "|---|---|---|---|"]
    for one, other in zip(*both, strict=True):
        hidden = "yes" if other.hidden else ""
        in_fp8 = f"{other.share:.2f} ({other.kind})"
        lines.append(f"| {one.label} | {one.share:.2f} | {in_fp8} | {hidden} |")
    found["schedule"] = "\n".join(lines)

    lines = [
        "| layer | one GPU / 2 | collectives, none hidden | measured | waited for |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.shape}, {one.precision.name} | {one.half:.2f} | {one.whole:.2f} | "
        f"{one.measured:.2f} | {one.exposed:.0%} |"
        for one in simulations
    ]
    found["calibration"] = "\n".join(lines)

    heads = " | ".join(f"TP {tp}" for tp in TP_SIZES)
    lines = [f"| layer | GPUs | {heads} |", "|---|---|" + "---|" * len(TP_SIZES)]
    for one in simulations:
        for gpus in GPUS:
            cells = [
                "{:.0%} ({:.0f} - {:.0f})".format(
                    one.efficiency(tp, gpus)[1], *reversed(one.tflops(tp, gpus))
                )
                for tp in TP_SIZES
            ]
            lines.append(f"| {one.shape}, {one.precision.name} | {gpus} | {' | '.join(cells)} |")
    found["steps"] = "\n".join(lines)
    return found


def beside_four(simulations: list[Simulation], measured: Measured) -> str:
    """A table of the times of four GPUs, computed from one and two GPUs, and measured."""
    lines = [
        f"| layer, {measured.gpu} | one GPU / 4 | TP 4, computed | TP 4, measured | error |",
        "|---|---|---|---|---|",
    ]
    for one in simulations:
        _, computed = one.step(4, 4)
        found = measured.shared(one.shape, one.precision.name, 4)
        lines.append(
            f"| {one.shape}, {one.precision.name} | {one.alone / 4:.2f} | {computed:.2f} | "
            f"{found:.2f} | {computed / found - 1:+.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Compute all tables and write them into the page."""
    schedules = {(tp, fp8): schedule(tp, fp8) for tp in TP_SIZES[1:] for fp8 in (False, True)}

    def simulations(measured: Measured) -> list[Simulation]:
        return [Simulation(s, p, schedules, measured) for s in SHAPES for p in PRECISIONS]

    four = Measured("parallel_4")
    found = tables(simulations(Measured())) | {"four": beside_four(simulations(four), four)}
    text = PAGE.read_text()
    for name, table in found.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = marks.sub(rf"\1\n{table}\n\n\2", text)
        print(table, end="\n\n")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
