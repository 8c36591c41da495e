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
from harness import Report, require_gpu
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

LAYERS, HIDDEN, HEADS, TOKENS = 6, 768, 12, 8192
BEFORE, MEASURED = 40, 15
PRECISIONS = {
    "bf16": None,
    "FP8 delayed": DelayedScaling(),
    "FP8 current": Float8CurrentScaling(),
}

Step = Callable[[Any], None]


class TorchLayer(nn.Module):
    """The same layer in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norms[1](x)), approximate="tanh"))


def our_layers(qkv_format: str, mask_type: str) -> nn.ModuleList:
    return nn.ModuleList(
        te.TransformerLayer(
            *(HIDDEN, 4 * HIDDEN, HEADS),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format=qkv_format,
            self_attn_mask_type=mask_type,
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
        )
        for _ in range(LAYERS)
    )


def trained(layers: nn.Module, recipe: Any, run: Callable[[Any], torch.Tensor]) -> Step:
    """Forward and backward; gradients are freed as an optimizer does."""

    def step(sizes: Any) -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = run(sizes)
        out.float().square().mean().backward()
        layers.zero_grad(set_to_none=True)

    return step


def lengths() -> dict[str, Step]:
    def batch(tokens: int) -> torch.Tensor:
        return torch.randn(8, tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

    plain = nn.Sequential(*[TorchLayer() for _ in range(LAYERS)]).cuda().bfloat16()

    def by_flash(tokens: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return plain(batch(tokens))

    steps = {
        "torch": trained(plain, None, lambda tokens: plain(batch(tokens))),
        "torch, flash attention": trained(plain, None, by_flash),
    }
    for name, recipe in PRECISIONS.items():
        layers = our_layers("bshd", "causal")

        def run(tokens: int, layers: nn.ModuleList = layers) -> torch.Tensor:
            x = batch(tokens)
            for layer in layers:
                x = layer(x)
            return x

        steps[name] = trained(layers, recipe, run)
    return steps


def packed() -> dict[str, Step]:
    steps = {}
    for name, recipe in PRECISIONS.items():
        layers = our_layers("thd", "padding_causal")

        def run(sequences: list[int], layers: nn.ModuleList = layers) -> torch.Tensor:
            ends = torch.tensor([0, *sequences]).cumsum(0).int().cuda()
            where: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends)
            where |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(sequences))
            x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
            for layer in layers:
                x = layer(x, **where)
            return x

        steps[name] = trained(layers, recipe, run)
    return steps


def experts(count: int, hidden: int, inner: int) -> dict[str, Step]:
    x = torch.randn(TOKENS, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def weights(rows: int, columns: int) -> nn.ParameterList:
        made = torch.randn(count, rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
        return nn.ParameterList(made.unbind())

    up, down = weights(inner, hidden), weights(hidden, inner)
    both = nn.ModuleList([up, down])

    def loop(rows: list[int]) -> torch.Tensor:
        parts = zip(x.split(rows), up, down, strict=True)
        return torch.cat([F.linear(F.gelu(F.linear(own, a)), b) for own, a, b in parts])

    steps = {"torch, one by one": trained(both, None, loop)}
    stacked = nn.ParameterList(torch.stack([w.detach() for w in one]) for one in (up, down))

    def grouped(rows: list[int]) -> torch.Tensor:
        ends = torch.tensor(rows).cumsum(0).int().cuda()
        middle = F.gelu(torch._grouped_mm(x, stacked[0].transpose(1, 2), ends))
        return torch._grouped_mm(middle, stacked[1].transpose(1, 2), ends)

    if hasattr(torch, "_grouped_mm"):
        steps["torch._grouped_mm"] = trained(stacked, None, grouped)
    for name, recipe in PRECISIONS.items():
        first, second = (
            te.GroupedLinear(count, *sizes, bias=False, params_dtype=torch.bfloat16)
            for sizes in ((hidden, inner), (inner, hidden))
        )

        def run(
            rows: list[int], first: nn.Module = first, second: nn.Module = second
        ) -> torch.Tensor:
            return second(F.gelu(first(x, rows)), rows)

        steps[name] = trained(nn.ModuleList([first, second]), recipe, run)
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
    measure(report, op, lengths(), 612, new_lengths)
    op = "packed, 6 layers h768, 12 sequences in 8192 tokens"
    measure(report, op, packed(), cut(TOKENS, 12, 1), partial(cuts, 12, 1))
    for count, hidden, inner in ((8, 2048, 8192), (32, 1024, 2048)):
        op = f"experts, {count} of h{hidden} f{inner}, 8192 tokens"
        equal = [TOKENS // count] * count
        measure(report, op, experts(count, hidden, inner), equal, partial(cuts, count, 16))


if __name__ == "__main__":
    main()
