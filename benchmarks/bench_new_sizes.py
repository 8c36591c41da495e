"""Training steps whose sizes differ from all steps before, as in most trainings on real data.

`one_ms` is the time of a step that repeats its sizes, `new_ms` that of a step with new sizes, after
40 such steps; both are medians of 15 steps, with the optimizer left out. `ratio` is `new_ms`
divided by that of the first row of the same work, which is plain PyTorch where it can do the work.

    lengths    6 layers, a batch of sequences of one length, another one in each step
    packed     6 layers, sequences in one tensor (thd), which is cut in other places in each step
    experts    two GroupedLinear with GELU between them, other numbers of rows in each step
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import torch
import torch.nn.functional as F
from contenders import DEVICE, DTYPE, PlainLayer, Size, our_layer, precision
from contenders import random as random_tensor
from harness import Report, require_gpu
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_engine.pytorch as te

LAYERS, SIZE, TOKENS = 6, Size(768, 3072, 12, sequence=612, batch=8), 8192
BEFORE, MEASURED = 40, 15
PRECISIONS = ("bf16", "fp8 delayed", "fp8 current")

Step = Callable[[Any], None]


def our_layers(**arguments: Any) -> nn.ModuleList:
    return nn.ModuleList([our_layer(SIZE, **arguments) for _ in range(LAYERS)])


def trained(layers: nn.Module, name: str, run: Callable[[Any], torch.Tensor]) -> Step:
    """Forward and backward; gradients are freed as an optimizer does."""

    def step(sizes: Any) -> None:
        with precision(name):
            out = run(sizes)
        out.float().square().mean().backward()
        layers.zero_grad(set_to_none=True)

    return step


def lengths() -> dict[str, Step]:
    def batch(tokens: int) -> torch.Tensor:
        return random_tensor(SIZE.batch, tokens, SIZE.hidden)

    plain = nn.Sequential(*[PlainLayer(SIZE) for _ in range(LAYERS)])

    def by_flash(tokens: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return plain(batch(tokens))

    steps = {
        "torch": trained(plain, "torch", lambda tokens: plain(batch(tokens))),
        "torch, flash attention": trained(plain, "torch", by_flash),
    }
    for name in PRECISIONS:
        layers = nn.Sequential(*our_layers())

        def run(tokens: int, layers: nn.Sequential = layers) -> torch.Tensor:
            return layers(batch(tokens))

        steps[name] = trained(layers, name, run)
    return steps


def packed() -> dict[str, Step]:
    steps = {}
    for name in PRECISIONS:
        layers = our_layers(attn_input_format="thd", self_attn_mask_type="padding_causal")

        def run(sequences: list[int], layers: nn.ModuleList = layers) -> torch.Tensor:
            ends = torch.tensor([0, *sequences]).cumsum(0).int().to(DEVICE)
            where: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends)
            where |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(sequences))
            x = random_tensor(TOKENS, SIZE.hidden)
            for layer in layers:
                x = layer(x, **where)
            return x

        steps[name] = trained(layers, name, run)
    return steps


def experts(count: int, hidden: int, inner: int) -> dict[str, Step]:
    x = random_tensor(TOKENS, hidden).requires_grad_()

    def weights(rows: int, columns: int) -> nn.ParameterList:
        return nn.ParameterList((random_tensor(count, rows, columns) * 0.02).unbind())

    up, down = weights(inner, hidden), weights(hidden, inner)
    both = nn.ModuleList([up, down])

    def loop(rows: list[int]) -> torch.Tensor:
        parts = zip(x.split(rows), up, down, strict=True)
        return torch.cat([F.linear(F.gelu(F.linear(own, a)), b) for own, a, b in parts])

    steps = {"torch, one by one": trained(both, "torch", loop)}
    stacked = nn.ParameterList(torch.stack([w.detach() for w in one]) for one in (up, down))

    def grouped(rows: list[int]) -> torch.Tensor:
        ends = torch.tensor(rows).cumsum(0).int().to(DEVICE)
        middle = F.gelu(torch._grouped_mm(x, stacked[0].transpose(1, 2), ends))
        return torch._grouped_mm(middle, stacked[1].transpose(1, 2), ends)

    if hasattr(torch, "_grouped_mm"):
        steps["torch._grouped_mm"] = trained(stacked, "torch", grouped)
    for name in PRECISIONS:
        first, second = (
            te.GroupedLinear(count, *sizes, bias=False, params_dtype=DTYPE, device=DEVICE)
            for sizes in ((hidden, inner), (inner, hidden))
        )

        def run(
            rows: list[int], first: nn.Module = first, second: nn.Module = second
        ) -> torch.Tensor:
            return second(F.gelu(first(x, rows)), rows)

        steps[name] = trained(nn.ModuleList([first, second]), name, run)
    return steps


def cut(total: int, count: int, unit: int) -> list[int]:
    """`count` random multiples of `unit` that add up to `total`."""
    places = [0, *sorted(random.sample(range(1, total // unit), count - 1)), total // unit]
    return [unit * (b - a) for a, b in pairwise(places)]


def cuts(count: int, unit: int) -> Iterator[list[int]]:
    """Random cuts of `TOKENS`, the same ones each time."""
    random.seed(0)
    while True:
        yield cut(TOKENS, count, unit)


def median_ms(step: Step, sizes: Iterator[Any], before: int) -> float:
    times = []
    for i in range(before + MEASURED):
        own = next(sizes)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(own)
        torch.cuda.synchronize()
        if i >= before:
            times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times), 2)


def measure(
    report: Report, op: str, steps: dict[str, Step], one: Any, new: Callable[[], Iterator[Any]]
) -> None:
    reference = 0.0
    for case, step in steps.items():
        one_ms = median_ms(step, repeat(one), 10)
        new_ms = median_ms(step, new(), BEFORE)
        reference = reference or new_ms
        ratio = round(new_ms / reference, 3)
        report.row(op=op, case=case, one_ms=one_ms, new_ms=new_ms, ratio=ratio)
    report.save()


def main() -> None:
    require_gpu()
    torch.manual_seed(0)
    report = Report("new_sizes")

    def new_lengths() -> Iterator[int]:
        return iter(random.Random(0).sample(range(200, 1025, 2), BEFORE + MEASURED))

    op = "lengths, 6 layers h768, 8 sequences of 200 - 1024"
    measure(report, op, lengths(), SIZE.sequence, new_lengths)
    op = "packed, 6 layers h768, 12 sequences in 8192 tokens"
    measure(report, op, packed(), cut(TOKENS, 12, 1), partial(cuts, 12, 1))
    for count, hidden, inner in ((8, 2048, 8192), (32, 1024, 2048)):
        op = f"experts, {count} of h{hidden} f{inner}, 8192 tokens"
        equal = [TOKENS // count] * count
        measure(report, op, experts(count, hidden, inner), equal, partial(cuts, count, 16))


if __name__ == "__main__":
    main()
