"""Which backend is the fastest for a problem: measurements, and the order that follows from them.

On an H200 (torch 2.11, flash-attn 4.0.0b36). Columns are microseconds of a forward, and of forward
with backward. Caches are warm; query, key and value are views of one projection. For flash-attn 4
the times include copying their gradients into one tensor, which is no longer necessary:

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

FP8 (recipes with fp8_dpa; casts included; one run; in small calls the GPU waits for the host, which
it does not do in layers):

                                  bf16, cuDNN     FP8, backward in 16 bit    backward in FP8
    b4 h32 s4096 d128 causal        899   3786       932   4009                 932   5308
    b4 h32 s4096 d128 full         1660   6939      1377   6844                1379   6227
    b2 h64 kv8 s8192 d128 causal   3493  14068      2640  13598                2779  19286
    b2 h64 kv8 s8192 d128 full     6840  26728      5025  25642                5025  24684
    b8 h16 s1024 d128 causal        303    990       526   1606                 534   1588
    b8 h32 s2048 d64 causal         426   1388       652   1631

flash-attn 4 is the fastest if a call keeps the GPU busy for longer than the host needs to launch
it. In CUDA graphs, where the host launches nothing, it is the fastest from half of that work on (b4
h16 s2048 d64 causal: a training step of 24 layers takes 34.5 ms, and 36.5 with cuDNN; in eager mode
59 and 41). It is slower than cuDNN for sequences with padding (b8 h32 s4096 d128 causal, half of
the tokens are real: thd 885 and 3875, cuDNN 694 and 2850). With sinks, and with gradients that
repeat bit for bit, it has not been timed. Our own graphs of cuDNN take as long as torch's forward,
and 0.92-1.01 times as long as torch's forward with backward; they copy nothing.
"""

from __future__ import annotations

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.backends.backend import Problem

# Backends whose tests in tests/pytorch/attention have passed on a GPU. All others come after these,
# whatever their speed, unless an environment variable asks for them.
CONFIRMED = frozenset({"cudnn", "cudnn_fp8", "flash4", "sdpa", "unfused"})

_FLASH = ("flash4", "flash3", "flash2")
_LARGE = ("flash4", "cudnn", "cudnn_fp8", "flash3", "sdpa", "flash2", "unfused")
_LARGE_BUT_SLOWER = ("cudnn", "cudnn_fp8", "flash4", "flash3", "sdpa", "flash2", "unfused")
_SMALL = ("cudnn", "cudnn_fp8", "sdpa", "flash3", "flash2", "flash4", "unfused")
# FLOP that an H200 computes in 120 us, which is the host time of a forward of flash-attn 4.
_LARGE_FROM = 6e10
_LARGE_IN_GRAPHS = 3e10  # the smallest that was measured there


def preference(problem: Problem, allowed: AttentionVariables) -> tuple[str, ...]:
    """Names of backends, the preferred one first; backends that are not named come last."""
    by_speed, asked = _by_speed(problem), _asked_for(allowed)
    return tuple(sorted(by_speed, key=lambda name: (name not in asked, name not in CONFIRMED)))


def _by_speed(problem: Problem) -> tuple[str, ...]:
    if _work(problem) < (_LARGE_IN_GRAPHS if problem.in_graph else _LARGE_FROM):
        return _SMALL
    slower = problem.rule.type.padding or problem.softmax_type != "vanilla" or problem.repeatable
    return _LARGE_BUT_SLOWER if slower else _LARGE


def _asked_for(allowed: AttentionVariables) -> tuple[str, ...]:
    """The backends that the environment asks for.

    NVTE_FUSED_ATTN_BACKEND asks for one of cuDNN's by its number; NVTE_FUSED_ATTN=0 leaves
    flash-attn.
    """
    if allowed.fused_backend is not None and allowed.fused:
        return ("cudnn_fp8",) if allowed.fused_backend == 2 else ("cudnn",)
    return _FLASH if allowed.flash and not allowed.fused else ()


def _work(problem: Problem) -> float:
    """FLOP of a forward; a problem with unknown sizes counts as large."""
    sizes = (problem.batch, problem.queries, problem.keys)
    if None in sizes:
        return _LARGE_FROM
    batch, queries, keys = (size or 0 for size in sizes)
    if problem.windowed and problem.rule.left >= 0:
        keys = min(keys, problem.rule.left + max(problem.rule.right, 0) + 1)
    pairs = queries * keys / (2 if problem.rule.type.causal and not problem.windowed else 1)
    return 2.0 * batch * problem.heads * pairs * (problem.key_size + problem.value_size)
