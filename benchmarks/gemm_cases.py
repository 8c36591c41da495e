"""The GEMMs that the benchmark measures and the tuner tunes: ours and torch's, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.kernels.gemm import gemm

E4M3, E5M2 = 5, 6
FP8_TYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

# name, tokens, and (output, input) features of each Linear.
LAYERS = [
    (
        "h4096",
        16384,
        {"qkv": (12288, 4096), "proj": (4096, 4096), "fc1": (16384, 4096), "fc2": (4096, 16384)},
    ),
    ("h4096", 8192, {"fc1": (16384, 4096), "fc2": (4096, 16384)}),
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
]
# m, n, k of products outside any layer, taken as fprop.
SINGLE = [(8192, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048)]


@dataclass(frozen=True)
class Case:
    """One product: D[m, n] = A B^T over k, as `kind` (fprop, dgrad or wgrad), in FP8 or bf16."""

    name: str
    kind: str
    fp8: bool
    m: int
    n: int
    k: int

    @property
    def label(self) -> str:
        return f"{self.name} {self.m}x{self.n}x{self.k}"

    @property
    def op(self) -> str:
        return f"{'fp8' if self.fp8 else 'bf16'} {self.kind}"

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Calls:
    """Two ways to the same product."""

    ours: Callable[[], torch.Tensor]
    torch: Callable[[], torch.Tensor]


def cases() -> Iterator[Case]:
    for fp8 in (True, False):
        for layer, tokens, linears in LAYERS:
            for linear, (outputs, inputs) in linears.items():
                name = f"{layer} {linear}"
                yield Case(name, "fprop", fp8, tokens, outputs, inputs)
                yield Case(name, "dgrad", fp8, tokens, inputs, outputs)
                yield Case(name, "wgrad", fp8, outputs, inputs, tokens)
        for m, n, k in SINGLE:
            yield Case("single", "fprop", fp8, m, n, k)


def prepare(case: Case) -> Calls:
    """Random data, and the calls that multiply it."""
    return _prepare_fp8(case) if case.fp8 else _prepare_bf16(case)


def _prepare_fp8(case: Case) -> Calls:
    # Hybrid format: gradients, which are `a` of dgrad and wgrad, are E5M2 and want exact sums.
    a_format = E4M3 if case.kind == "fprop" else E5M2
    fast = case.kind == "fprop"
    scales = torch.tensor([0.5, 2.0], device="cuda")
    scale = scales[:1]
    a = torch.randn(case.m, case.k, device="cuda").to(FP8_TYPES[a_format])
    b = torch.randn(case.n, case.k, device="cuda").to(FP8_TYPES[E4M3])
    a_codes, b_codes, b_columns = a.view(torch.uint8), b.view(torch.uint8), b.t()
    bf16 = torch.bfloat16

    def ours() -> torch.Tensor:
        return gemm(a_codes, b_codes, bf16, scales, scales, a_format, E4M3, fast_accumulation=fast)[
            0
        ]

    def torchs() -> torch.Tensor:
        return torch._scaled_mm(a, b_columns, scale, scale, out_dtype=bf16, use_fast_accum=fast)

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

    def ours() -> torch.Tensor:
        return gemm(a, b, bf16, a_transposed=a_transposed, b_transposed=b_transposed)[0]

    return Calls(ours, lambda: torch.mm(a_rows, b_columns))
