"""The GEMMs that bench_gemm measures and tune_gemm tunes: ours and torch's, on the same data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.kernels.gemm import gemm
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.scale_layout import SQUARES, block_layout

FP8_TYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

# Name, tokens, and (output, input) features of each Linear.
LAYERS = [
    (
        "h4096",
        16384,
        {"qkv": (12288, 4096), "proj": (4096, 4096), "fc1": (16384, 4096), "fc2": (4096, 16384)},
    ),
    ("h4096", 8192, {"fc1": (16384, 4096), "fc2": (4096, 16384), "gated": (32768, 4096)}),
    (
        "h8192",
        4096,
        {"qkv": (24576, 8192), "proj": (8192, 8192), "fc1": (28672, 8192), "fc2": (8192, 28672)},
    ),
    (
        "h2048",
        8192,
        {"qkv": (6144, 2048), "proj": (2048, 2048), "fc1": (8192, 2048), "fc2": (2048, 8192)},
    ),
    (
        "h768",
        8192,
        {"qkv": (2304, 768), "proj": (768, 768), "fc1": (3072, 768), "fc2": (768, 3072)},
    ),
    # The other two models of bench_training.
    (
        "h1024",
        8192,
        {"qkv": (3072, 1024), "proj": (1024, 1024), "fc1": (4096, 1024), "fc2": (1024, 4096)},
    ),
    (
        "llama",
        8192,
        {"qkv": (3072, 2048), "gate_up": (11008, 2048), "fc2": (2048, 5504)},
    ),
]
# Layers that are also measured under tensor and sequence parallelism.
SHARED = [layer for layer in LAYERS if layer[0] in ("h4096", "h8192") and "qkv" in layer[2]]
RANKS = (2, 4)
ENDS = ("proj", "fc2")  # the Linears at the end of a block, which may add a residual
# m, n, k of GEMMs that belong to no layer; they run as fprop.
SINGLE = [(8192, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048)]


@dataclass(frozen=True)
class Case:
    """A GEMM: D[m, n] = A B^T over k, of a kind: fprop, dgrad or wgrad.

    `precision` is "bf16", "fp8" (a single scale for a matrix), or "fp8 blocks". With `adds`, the
    result is the sum of the product and a matrix.
    """

    name: str
    kind: str
    precision: str
    m: int
    n: int
    k: int
    adds: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.m}x{self.n}x{self.k}"

    @property
    def op(self) -> str:
        return f"{self.precision} {self.kind}{' plus residual' if self.adds else ''}"

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Calls:
    """Our call and torch's call for the same GEMM; `torch` is None if torch has none."""

    ours: Callable[[], torch.Tensor]
    torch: Callable[[], torch.Tensor] | None

    def all(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The calls by name."""
        ways = {"ours": self.ours}
        return ways if self.torch is None else ways | {"torch": self.torch}


def cases(precisions: Sequence[str] = ("fp8", "bf16")) -> Iterator[Case]:
    for precision in precisions:
        for layer, tokens, linears in LAYERS:
            for linear, (outputs, inputs) in linears.items():
                name = f"{layer} {linear}"
                yield Case(name, "fprop", precision, tokens, outputs, inputs)
                if linear in ENDS and precision != "fp8 blocks":
                    yield Case(name, "fprop", precision, tokens, outputs, inputs, adds=True)
                yield Case(name, "dgrad", precision, tokens, inputs, outputs)
                yield Case(name, "wgrad", precision, outputs, inputs, tokens)
        for m, n, k in SINGLE:
            yield Case("single", "fprop", precision, m, n, k)
        yield from shared_cases(precision)


def shared_cases(precision: str) -> Iterator[Case]:
    """The different GEMMs of a rank; those next to a collective run on one rank's tokens."""
    seen: set[tuple[bool, int, int, int]] = set()
    for (layer, tokens, linears), ranks in itertools.product(SHARED, RANKS):
        for linear, (outputs, inputs) in linears.items():
            own = tokens // ranks
            if linear in ("qkv", "fc1"):  # column parallel; dgrad has all tokens
                share, dgrad = outputs // ranks, (tokens, inputs, outputs // ranks)
                sizes = {"fprop": (own, share, inputs), "wgrad": (share, inputs, tokens)}
            else:
                share, dgrad = inputs // ranks, (own, inputs // ranks, outputs)
                sizes = {"fprop": (own, outputs, share), "wgrad": (outputs, share, tokens)}
            for kind, (m, n, k) in {**sizes, "dgrad": dgrad}.items():
                problem = (kind == "fprop", m, n, k)
                if problem not in seen:
                    seen.add(problem)
                    yield Case(f"{layer} TP{ranks} {linear}", kind, precision, m, n, k)


def prepare(case: Case) -> Calls:
    """Make random data, and the calls that multiply it."""
    by = {"fp8": _prepare_fp8, "fp8 blocks": _prepare_blocks, "bf16": _prepare_bf16}
    return by[case.precision](case)


def _prepare_fp8(case: Case) -> Calls:
    # Hybrid format: gradients, operand `a` of dgrad and wgrad, are E5M2, with precise accumulation.
    a_format = E4M3 if case.kind == "fprop" else E5M2
    fast = case.kind == "fprop"
    scales = torch.tensor([0.5, 2.0], device="cuda")
    scale = scales[:1]
    a = torch.randn(case.m, case.k, device="cuda").to(FP8_TYPES[a_format])
    b = torch.randn(case.n, case.k, device="cuda").to(FP8_TYPES[E4M3])
    a_codes, b_codes, b_columns = a.view(torch.uint8), b.view(torch.uint8), b.t()
    bf16, added = torch.bfloat16, _addend(case)
    of_scales = (scales, scales, a_format, E4M3)

    def ours() -> torch.Tensor:
        return gemm(a_codes, b_codes, bf16, *of_scales, fast_accumulation=fast, addend=added)

    def torchs() -> torch.Tensor:
        y = torch._scaled_mm(a, b_columns, scale, scale, out_dtype=bf16, use_fast_accum=fast)
        return y if added is None else y + added

    return Calls(ours, torchs)


def _prepare_blocks(case: Case) -> Calls:
    # Weights, operand `b` of fprop and dgrad, have square blocks.
    dimensions = 1 if case.kind == "wgrad" else 2
    formats = block_layout(1).code(E4M3), block_layout(dimensions).code(E4M3)
    bf16, sizes = torch.bfloat16, ((case.m, case.k), (case.n, case.k))
    (a, a_scales), (b, b_scales) = (
        quantize_blocks(torch.randn(size, device="cuda"), format, True, 0.0, True, False, None)[:2]
        for size, format in zip(sizes, formats, strict=True)
    )
    used = b_scales if dimensions == 1 else b_scales[:, : -(-case.k // SQUARES.run)].t()
    a_fp8, b_fp8 = (t.view(FP8_TYPES[E4M3]) for t in (a, b))

    def ours() -> torch.Tensor:
        return gemm(a, b, bf16, a_scales, b_scales, *formats)

    def torchs() -> torch.Tensor:
        return torch._scaled_mm(a_fp8, b_fp8.t(), a_scales.t(), used, out_dtype=bf16)

    try:
        torchs()
    except (RuntimeError, ValueError):
        return Calls(ours, None)
    return Calls(ours, torchs)


def _prepare_bf16(case: Case) -> Calls:
    bf16 = torch.bfloat16
    a_transposed, b_transposed = case.kind == "wgrad", case.kind != "fprop"
    a_shape = (case.k, case.m) if a_transposed else (case.m, case.k)
    b_shape = (case.k, case.n) if b_transposed else (case.n, case.k)
    a = torch.randn(a_shape, device="cuda", dtype=bf16)
    b = torch.randn(b_shape, device="cuda", dtype=bf16)
    a_rows = a.t() if a_transposed else a
    b_columns = b if b_transposed else b.t()
    added = _addend(case)

    def ours() -> torch.Tensor:
        return gemm(a, b, bf16, None, None, -1, -1, a_transposed, b_transposed, addend=added)

    if added is not None:
        return Calls(ours, lambda: torch.addmm(added, a_rows, b_columns))
    return Calls(ours, lambda: torch.mm(a_rows, b_columns))


def _addend(case: Case) -> torch.Tensor | None:
    if not case.adds:
        return None
    return torch.randn(case.m, case.n, device="cuda", dtype=torch.bfloat16)
