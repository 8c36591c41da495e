"""The goals of the project, and the best values of other libraries on the same kind of GPU.

A goal covers the rows of a benchmark that have a `bar` and whose `op` matches the goal's pattern.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A line of the summary table."""

    work: str
    bar: str
    peer: str
    benchmark: str
    op: str = ".*"

    def covers(self, benchmark: str, op: str) -> bool:
        """Whether a row of this benchmark counts towards this goal."""
        return benchmark == self.benchmark and re.fullmatch(self.op, op) is not None


GOALS = [
    Goal("FP8 / BF16 GEMM, over torch", ">= 1.00x each", "1.00", "gemm"),
    Goal("cast", ">= 0.95 of copy", "TE 0.91", "quantize", r"cast"),
    Goal("cast + transpose", ">= 0.88 of copy", "TE 0.87", "quantize", r"cast \+ transpose"),
    Goal(
        "cast + transpose + dbias",
        ">= 0.86 of copy",
        "TE 0.75",
        "quantize",
        r"cast \+ transpose \+ dbias",
    ),
    Goal(
        "cast in 1 x 128 and 128 x 128 blocks, + transpose",
        ">= 0.80 of copy",
        "-",
        "blocks",
        r"cast .*",
    ),
    Goal("GEMM with block scales, over torch", ">= 1.00x each", "1.00", "blocks", r"fp8 .*"),
    Goal("RMSNorm forward", ">= 0.95 of copy", "quack 0.95", "norm", r"rmsnorm forward"),
    Goal("LayerNorm forward", ">= 0.93 of copy", "TE 0.73", "norm", r"layernorm forward"),
    Goal(
        "norm with FP8 row-wise + transposed output",
        ">= 0.85 of copy",
        "TE 0.54 / 0.49",
        "norm",
        r".*norm forward fp8",
    ),
    Goal("RMSNorm backward", ">= 0.87 of copy", "TE 0.87", "norm", r"rmsnorm backward"),
    Goal("LayerNorm backward", ">= 0.80 of copy", "TE 0.72", "norm", r"layernorm backward"),
    Goal(
        "activations to FP8 row + transposed, forward",
        ">= 0.85 of copy",
        "TE 0.69",
        "activation",
        r".* forward fp8",
    ),
    Goal(
        "activations to FP8 row + transposed, backward with dbias",
        ">= 0.84 of copy",
        "TE 0.65",
        "activation",
        r".* backward dbias fp8",
    ),
    Goal("masked softmax", ">= 0.85 of copy", "TE 0.48", "softmax", r"masked softmax forward"),
    Goal("causal softmax", ">= 0.85 of copy", "TE 0.79", "softmax", r"causal softmax forward"),
    Goal("softmax", ">= 0.85 of copy", "TE 0.84", "softmax", r"softmax forward"),
    Goal("softmax backward", ">= 0.85 of copy", "TE 0.58", "softmax", r"softmax backward"),
    Goal("bias + dropout + residual", ">= 0.90 of copy", "-", "softmax", r"dropout_add forward"),
    Goal("its backward", ">= 0.90 of copy", "-", "softmax", r"dropout_add backward( dbias)?"),
    Goal("rotary position embedding", ">= 0.85 of copy", "-", "rope", r"rope (forward|backward)"),
    Goal(
        "merging attention over parts of the keys, and sums of parts",
        ">= 0.85 of copy",
        "-",
        "merge_parts",
        r"merge_parts (attention|sum)",
    ),
    Goal(
        "attention, over the best library",
        ">= 0.98x",
        "cuDNN 1.0, FA4 1.08-1.3",
        "attention",
        r"forward( \+ backward)?",
    ),
    Goal(
        "attention of half padding, over padded",
        ">= 1.6x",
        "-",
        "attention_padding",
        r"half padding.*",
    ),
    Goal("attention in a window of 1024 of 16384", ">= 4x", "-", "attention", r"window.*"),
    Goal(
        "TransformerLayer h4096 f16384 s4096 b4, FP8 and BF16, ms",
        "<= 21.0; <= 32.8",
        "TE 23.2; torch.compile 34.6",
        "layer",
        r"TransformerLayer h4096 .*",
    ),
    Goal(
        "TransformerLayer h2048 f8192 s2048 b4, FP8 and BF16, ms",
        "<= 3.0; <= 4.3",
        "TE 3.68; 4.84",
        "layer",
        r"TransformerLayer h2048 .*",
    ),
    Goal(
        "TransformerLayer h8192 f28672 s4096 b1, FP8 and BF16, ms",
        "<= 17.2; <= 28.0",
        "TE 18.77; 29.37",
        "layer",
        r"TransformerLayer h8192 .*",
    ),
    Goal(
        "LayerNormMLP gelu; swiglu, 8192 tokens, FP8, ms",
        "<= 5.6; <= 8.2",
        "TE 5.96; 8.85",
        "layer",
        r"LayerNormMLP .*",
    ),
    Goal(
        "memory of a step, TransformerLayer h4096 s4096 b4, FP8 and BF16, MiB",
        "<= 2900; <= 2690",
        "TE 3210; 2690",
        "layer",
        r"peak memory TransformerLayer .*",
    ),
    Goal(
        "memory of a step, LayerNormMLP h4096, 16384 tokens, FP8 and BF16, MiB",
        "<= 2100; <= 1920",
        "TE 2312; 1920",
        "layer",
        r"peak memory LayerNormMLP .*",
    ),
    Goal(
        "125M GPT step, over plain torch",
        "bf16 <= 0.75x, FP8 <= 0.62x",
        "torch.compile 0.85, TE 1.86 / 2.1",
        "gpt",
    ),
    Goal(
        "host time of a forward, over nn.Linear",
        "bf16 <= 1.15x, FP8 <= 1.6x / 2.0x",
        "TE 5.2x, 11.6x",
        "host",
    ),
    Goal("memory of FP8 weights at rest, over bf16", "<= 0.56x", "-", "fp8_weights", "memory.*"),
    Goal("step with FP8 weights, over bf16 weights", "<= 1.00x", "-", "fp8_weights", ".* step .*"),
    Goal("all statistics of a tensor", "<= 18 us", "seven torch calls 701 us", "statistics"),
    Goal(
        "4 layers in FP8 with all statistics, over plain steps",
        "s4096 b4 <= 1.03x, s2048 b2 <= 1.05x; freq 10 <= 1.005x",
        "TE 13.4x (s2048 b2); 2.26x",
        "inspect",
    ),
    Goal("activation checkpointing, over a step without", "<= 1.34x", "-", "checkpoint"),
    Goal(
        "125M GPT captured, over plain torch eager",
        "<= 0.68x",
        "-",
        "graph",
        r"layers",
    ),
    Goal("GPU idle in its replays", "<= 3 %", "-", "graph", r"layers, idle"),
    Goal("torch.compile, over eager", "<= 1.00x; h1024 1.15x", "-", "compiled", r"compiled.*"),
    Goal(
        "layer of 2 GPUs, TP2 + SP, over half of one GPU's time",
        "h4096 <= 1.103x, 1.107x, 1.091x, h8192 <= 1.057x, 1.076x, 1.057x (delayed, current, bf16)",
        "TE 13.49 / 14.20 / 20.25, 10.28 / 11.02 / 16.45 ms",
        "parallel",
        r"layer, TP2 .*",
    ),
    Goal(
        "attention of 2 GPUs that share sequences, over half of one GPU's time",
        "<= 1.05x, 1.02x at s32768",
        "TE 1.15x, 1.05x",
        "context_parallel",
        r"context parallel .*",
    ),
    Goal(
        "layer of 4 GPUs, TP4 + SP, over a quarter of one GPU's time",
        "h4096 <= 1.234x, h8192 <= 1.159x (delayed)",
        "TE 7.90, 5.83 ms",
        "parallel_4",
        r"layer, TP4 .*",
    ),
    Goal(
        "attention of 4 GPUs that share sequences, over a quarter of one GPU's time",
        "<= 1.24x, 1.05x at s32768",
        "TE 1.97x, 1.13x",
        "context_parallel_4",
        r"context parallel .*",
    ),
    Goal("125M GPT of 2 GPUs, DDP, tokens over one GPU's", ">= 1.9x", "-", "replicas", "125M.*"),
    Goal(
        "12 layers of 2 GPUs, FSDP2, FP8 weights, tokens over one GPU's",
        ">= 1.9x",
        "-",
        "shards",
        ".* layers .*",
    ),
    Goal("bytes gathered as FP8, over bf16", "<= 0.505x", "-", "shards", "layer .* gathered"),
    Goal(
        "4 layers of 2 GPUs, TP2 + SP, with all statistics, over plain steps",
        "<= 1.04x",
        "-",
        "parallel_costs",
        ".* statistics",
    ),
    Goal(
        "host time of a collective of a layer, over 15 us",
        "<= 1.0x",
        "-",
        "parallel_costs",
        "host .*",
    ),
    Goal("offload copies, of a plain cudaMemcpyAsync", ">= 0.9", "-", "offload", r"copies"),
    Goal("offload step, over max(compute, copies)", "<= 1.05x", "-", "offload", r"step"),
    *(
        Goal(f"training {model}{batch}, {what}", bar, peer, f"training_{name}{kind}", op)
        for kind, batch, memory in (
            ("", "", ("peak memory over the least of others", "<= 1.00x", "1.00", ".* memory .*")),
            (
                "_largest",
                ", largest batch in 80 GiB",
                ("sequences over the most of others", ">= 1.00x", "1.00", ".* batch over .*"),
            ),
        )
        for name, model, bf16, fp8 in (
            ("125m", "GPT 125M", "1.15", "1.45"),
            ("350m", "GPT 350M", "1.10", "1.50"),
            ("1.3b", "Llama 1.3B", "1.05", "1.50"),
        )
        for what, bar, peer, op in (
            ("bf16 over torch.compile", f">= {bf16}x", "-", "bf16 over torch.compile"),
            ("FP8 over torch.compile", f">= {fp8}x", "-", "fp8 over torch.compile"),
            ("FP8 over torchao", ">= 1.15x", "1.00", "fp8 over torchao"),
            memory,
        )
    ),
    *(
        Goal(
            f"training {model} on 2 GPUs (DDP, FSDP2, TP2 + SP), {how}, tokens over one GPU's",
            ">= 1.9x",
            "-",
            f"training_ranks_{name}{kind}",
        )
        for name, model in (("125m", "GPT 125M"), ("350m", "GPT 350M"), ("1.3b", "Llama 1.3B"))
        for kind, how in (("", "eager"), ("_graphs", "in graphs"))
    ),
]
