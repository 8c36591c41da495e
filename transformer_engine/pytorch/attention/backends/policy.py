"""Which backend is the fastest for a problem: what was measured, as data.

On an H200 (torch 2.11, flash-attn 4.0.0b36; us forward, and forward with backward; warm caches;
views of one projection, into whose gradient those of flash-attn 4 were still copied):

    bf16                                cuDNN            flash-attn 4
    b4 h32 s4096 d128 causal             974   3972       907   3620
    b4 h32 s4096 d128 full              1791   7081      1666   6441
    b4 h32 kv8 s4096 d128 causal         971   4036       901   3693
    b2 h32 s8192 d128 causal            1904   7367      1711   6448
    b2 h32 s8192 d128 full              3584  13265      3225  12427
    b8 h32 s2048 d64 causal              351   1421       354   1278
    b8 h32 s2048 d64 full                602   2338       556   2093
    b8 h12 s1024 d64 causal               52    530        60    790
    b1 h32 s16384 d128 window 1024       619   2271       534   2171
    host time of a forward                27              120

FP8 (recipes with fp8_dpa; casts included; one run; small calls, not layers, wait for the host):

                                  bf16, cuDNN     FP8, backward in 16 bit    backward in FP8
    b4 h32 s4096 d128 causal        899   3786       932   4009                 932   5308
    b4 h32 s4096 d128 full         1660   6939      1377   6844                1379   6227
    b2 h64 kv8 s8192 d128 causal   3493  14068      2640  13598                2779  19286
    b2 h64 kv8 s8192 d128 full     6840  26728      5025  25642                5025  24684
    b8 h16 s1024 d128 causal        303    990       526   1606                 534   1588
    b8 h32 s2048 d64 causal         426   1388       652   1631

flash-attn 4 is the fastest where the GPU has more to do than the host needs to ask for it, and in
CUDA graphs, where the host does nothing, from half of that on (b4 h16 s2048 d64 causal: a training
step of 24 layers takes 34.5 ms, with cuDNN 36.5; in eager mode 59 and 41). It is not of sequences
with padding (b8 h32 s4096 d128 causal, half of the tokens: thd 885 and 3875, cuDNN 694 and 2850);
with sinks, and with gradients that repeat, it has not been timed. Our own graphs of
cuDNN take the time of torch's forward and 0.92-1.01 of that with backward, and copy nothing.
"""

from __future__ import annotations

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.backends.backend import Problem

# Backends whose tests a GPU has passed. Others wait behind all of these, whatever their speed,
# until the tests in tests/pytorch/attention pass with them on a GPU; or the environment asks.
CONFIRMED = frozenset({"cudnn", "cudnn_fp8", "flash4", "sdpa", "unfused"})

_FLASH = ("flash4", "flash3", "flash2")
_LARGE = ("flash4", "cudnn", "cudnn_fp8", "flash3", "sdpa", "flash2", "unfused")
_LARGE_BUT_SLOWER = ("cudnn", "cudnn_fp8", "flash4", "flash3", "sdpa", "flash2", "unfused")
_SMALL = ("cudnn", "cudnn_fp8", "sdpa", "flash3", "flash2", "flash4", "unfused")
# FLOP of a forward that an H200 does in the 120 us that a forward of flash-attn 4 keeps the host.
_LARGE_FROM = 6e10
_LARGE_IN_GRAPHS = 3e10  # the smallest that was measured there


def preference(problem: Problem, allowed: AttentionVariables) -> tuple[str, ...]:
    """Names of backends, the preferred one first; what is not named comes after."""
    by_speed, asked = _by_speed(problem), _asked_for(allowed)
    return tuple(sorted(by_speed, key=lambda name: (name not in asked, name not in CONFIRMED)))


def _by_speed(problem: Problem) -> tuple[str, ...]:
    if _work(problem) < (_LARGE_IN_GRAPHS if problem.in_graph else _LARGE_FROM):
        return _SMALL
    slower = problem.rule.type.padding or problem.softmax_type != "vanilla" or problem.repeatable
    return _LARGE_BUT_SLOWER if slower else _LARGE


def _asked_for(allowed: AttentionVariables) -> tuple[str, ...]:
    """Whom the environment names by leaving out the other kind, or by its number."""
    if allowed.fused_backend is not None and allowed.fused:
        return ("cudnn_fp8",) if allowed.fused_backend == 2 else ("cudnn",)
    return _FLASH if allowed.flash and not allowed.fused else ()


def _work(problem: Problem) -> float:
    """FLOP of a forward; what is not known beforehand counts as much."""
    sizes = (problem.batch, problem.queries, problem.keys)
    if None in sizes:
        return _LARGE_FROM
    batch, queries, keys = (size or 0 for size in sizes)
    if problem.windowed and problem.rule.left >= 0:
        keys = min(keys, problem.rule.left + max(problem.rule.right, 0) + 1)
    pairs = queries * keys / (2 if problem.rule.type.causal and not problem.windowed else 1)
    return 2.0 * batch * problem.heads * pairs * (problem.key_size + problem.value_size)
