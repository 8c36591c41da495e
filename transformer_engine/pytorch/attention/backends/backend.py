"""What a backend is, and what it may require of a problem.

A backend is a pair of functions and a list of requirements. A requirement is a condition on a
`Problem`, the description of a call, with the sentence that a user reads if it does not hold.
Requirements that several backends have are at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine._env import AttentionVariables
from transformer_engine.pytorch.attention.core.call import Call, elements_of
from transformer_engine.pytorch.attention.masks.masks import MaskRule, mask_name, mask_rule

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Problem(NamedTuple):
    """What the choice of a backend depends on.

    Attributes:
        device: `cpu` or `cuda`.
        gpu: index of the GPU; None for the current GPU, and for other devices.
        capability: compute capability of the GPU; None for other devices.
        dtype: of queries, keys and values.
        qkv_format: `sbhd`, `bshd` or `thd`.
        rule: mask type, window and alignment.
        batch: number of sequences; None if the host does not know it.
        queries: tokens of the longest query sequence; None if the host does not know it.
        keys: the same for keys and values.
        heads: number of query heads.
        groups: number of key and value heads.
        key_size: size of a head of queries and keys.
        value_size: size of a head of values.
        bias_type: one of `BIAS_TYPES`.
        bias_shape: shape of a bias tensor.
        bias_grad: the bias needs a gradient.
        bias_mixed: the bias has another dtype than queries.
        given_slopes: the user has given slopes for ALiBi.
        dropout: probability.
        training: a gradient is needed, now or in a recomputation.
        repeatable: gradients must repeat bit for bit.
        padded_by_mask: padding is given by a mask, not by lengths.
        alike: queries and keys are known to have the same lengths.
        softmax_type: see `Sink`.
        cache: kind of the cache of keys and values: `""` for none, `appended`, `fixed` or `named`,
            see `cache/inference.py`.
        fp8: attention is in FP8, or calibrates for it.
        calibrating: attention records amaxes and casts nothing.
        compiling: inside torch.compile.
        in_graph: the program has announced that it captures CUDA graphs, or warms up for it.
        part: the keys are only some of those that the softmax goes over, see `Parts`.
        large_packed: a thd tensor has `MOST_ELEMENTS` elements or more, with all sequences.
    """

    device: str = "cpu"
    gpu: int | None = None
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    qkv_format: str = "sbhd"
    rule: MaskRule = mask_rule("causal")
    batch: int | None = None
    queries: int | None = None
    keys: int | None = None
    heads: int = 16
    groups: int = 16
    key_size: int = 64
    value_size: int = 64
    bias_type: str = "no_bias"
    bias_shape: tuple[int, ...] | None = None
    bias_grad: bool = False
    bias_mixed: bool = False
    given_slopes: bool = False
    dropout: float = 0.0
    training: bool = True
    repeatable: bool = False
    padded_by_mask: bool = False
    alike: bool = True
    softmax_type: str = "vanilla"
    cache: str = ""
    fp8: bool = False
    calibrating: bool = False
    compiling: bool = False
    in_graph: bool = False
    part: bool = False
    large_packed: bool = False

    @property
    def large(self) -> bool:
        """Whether a tensor is known to have `MOST_ELEMENTS` elements or more.

        It may be queries, keys, values or the result.
        """
        batch = self.batch or 0
        rows = (batch * (self.queries or 0), batch * (self.keys or 0))
        heads, sizes = (self.heads, self.groups), (self.key_size, self.value_size)
        return self.large_packed or elements_of(rows, heads, sizes) >= MOST_ELEMENTS

    @property
    def empty(self) -> bool:
        """Whether there are no queries or no keys."""
        return 0 in (self.batch, self.queries, self.keys)

    @property
    def summary(self) -> str:
        """A description of the problem for errors."""
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads} query and {self.groups} key heads"
        sizes = f"of sizes {self.key_size} and {self.value_size}"
        mask = mask_name(self.rule.type)
        window = f" with the window {self.rule.left, self.rule.right}" if self.windowed else ""
        return (
            f"{dtype} {self.qkv_format} tensors{' in FP8' if self.fp8 else ''} on {self.device},"
            f" {heads} {sizes},"
            f" {self.queries or 'any'} queries and {self.keys or 'any'} keys, {mask}{window},"
            f" {self.bias_type}"
        )

    @property
    def windowed(self) -> bool:
        """Whether a window hides keys that the mask type alone would let a query see."""
        return self.rule.left >= 0 or (self.rule.right >= 0 and not self.rule.type.causal)


class Requirement(NamedTuple):
    """A condition on a problem, and the reason that users see if it does not hold.

    `reason` is a text, or a function of the problem.
    """

    holds: Callable[[Problem, AttentionVariables], bool]
    reason: str | Callable[[Problem], str]


class Needs(NamedTuple):
    """Which gradients the backward must compute. If there are none, no backward follows."""

    query: bool = False
    key: bool = False
    value: bool = False
    bias: bool = False
    sink: bool = False

    @property
    def weights(self) -> bool:
        """Whether any of these gradients is computed from that of the attention weights."""
        return self.query or self.key or self.bias or self.sink

    def pick(self, *gradients: torch.Tensor | None) -> Gradients:
        """`Gradients` of query, key, value, bias and sink, with None for those not needed."""
        pairs = zip(gradients, self, strict=False)
        return Gradients(*[x if need else None for x, need in pairs])


NO_BACKWARD = Needs()


class Saved(NamedTuple):
    """What a forward leaves for its backward.

    Attributes:
        log_sum_exp: fp32, logarithm of the sum of the exponentials of a query's scores, in the
            layout that the backend documents; None if the backend does not compute it.
        tensors: all other tensors that the backward reads, or None in their place. Autograd checks
            that they were not changed in place. If there is a log-sum-exp, the first four tensors
            that the kernel saves (those behind the tensors that adapters add with `wrap`) are
            query, key, value and result.
        facts: what the backward needs beside tensors.
    """

    log_sum_exp: torch.Tensor | None
    tensors: tuple[Any, ...]
    facts: Any = None

    def wrap(self, tensors: tuple[Any, ...], facts: Any = None) -> Saved:
        """Add what an adapter around the backend saves: tensors in front, and facts."""
        inner = (len(tensors), facts, self.facts)
        return Saved(self.log_sum_exp, (*tensors, *self.tensors), inner)

    def unwrap(self) -> tuple[Saved, tuple[Any, ...], Any]:
        """The reverse of `wrap`: the inner `Saved`, and tensors and facts of the adapter."""
        count, facts, inner = self.facts
        return Saved(self.log_sum_exp, self.tensors[count:], inner), self.tensors[:count], facts

    def stripped(self) -> Saved:
        """What a kernel saved, without query, key, value, result and log-sum-exp."""
        return Saved(None, self.tensors[4:], self.facts)


class Gradients(NamedTuple):
    """The gradients that a backward returns; None where `Needs` asks for none."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None


class Parts(NamedTuple):
    """How a backend computes attention with a part of the keys, as context parallelism needs it.

    The results of all parts are merged by their log-sum-exp. The backward of a part is the
    backend's own, called with the merged result and the log-sum-exp of all keys. Between forward
    and backward the caller holds query, key, value and result once for all parts.

    Attributes:
        log_sum_exp: `log_sum_exp(saved, call)` returns fp32 `[..., heads]` in the format of the
            call. The value of a query that sees no key of the part is undefined, perhaps infinite.
        strip: `strip(saved, call)` removes query, key, value, result and log-sum-exp.
        restore: `restore(stripped, tensors, log_sum_exp, call)` reverses `strip`. `tensors` are
            query, key, value and result in the format of the call; the log-sum-exp of a query that
            sees no key at all is +inf.
        takes_codes: in FP8 attention the forward takes codes of query, key and value.
    """

    log_sum_exp: Callable[[Saved, Call], torch.Tensor]
    strip: Callable[[Saved, Call], Saved]
    restore: Callable[[Saved, tuple[torch.Tensor, ...], torch.Tensor, Call], Saved]
    takes_codes: bool = False


class KernelParts(NamedTuple):
    """The functions of `Parts` for a kernel: in the kernel's shapes, and without the call."""

    log_sum_exp: Callable[[Saved], torch.Tensor]
    strip: Callable[[Saved], Saved]
    restore: Callable[[Saved, tuple[torch.Tensor, ...], torch.Tensor], Saved]


Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Call, Needs], tuple[torch.Tensor, Saved | None]
]
Backward = Callable[[torch.Tensor, Saved, Call, Needs], Gradients]


class Backend(NamedTuple):
    """A way to compute attention; `backends/__init__.py` has the contract of its two functions.

    Attributes:
        name: the backend's name in errors, logs and tables.
        forward: computes the result, and saves what the backward reads.
        backward: computes the gradients.
        keeps_scores: whether `checkpoint_core_attention` saves memory with this backend.
        requirements: conditions that a problem must meet, all of them.
        notice: returns a text to show to the user, once, when the backend takes a problem; `""` for
            none.
        differentiable: whether torch can differentiate `forward` itself, called with gradients
            switched on and no needs. It does so if torch compiles or functorch transforms the call.
        draw_seed: draws the seed of dropout on a device; the caller puts it into the call. If this
            is None, `forward` draws random numbers itself.
        recordable: whether calls with these settings do nothing but allocate and call `_C`.
        records_on: the types of devices where some calls are recordable.
        persistent: the tensors that recordable calls read and write beside their arguments.
        parts: attention with a part of the keys; None for backends without a log-sum-exp.
        settings: the settings of a call; calls with equal ones share a plan.
    """

    name: str
    forward: Forward
    backward: Backward
    keeps_scores: bool
    requirements: tuple[Requirement, ...]
    notice: Callable[[Problem, AttentionVariables], str] = lambda problem, allowed: ""
    differentiable: bool = False
    draw_seed: Callable[[torch.device], torch.Tensor] | None = None
    recordable: Callable[[Call], bool] = lambda call: False
    records_on: tuple[str, ...] = ()
    persistent: Callable[[Call], Sequence[torch.Tensor]] = lambda call: ()
    parts: Parts | None = None
    settings: Callable[[Call], Call] = Call.settings

    def __hash__(self) -> int:
        """A quick hash, because every call looks up its plan by it."""
        return hash(self.forward)


def refusal(backend: Backend, problem: Problem, allowed: AttentionVariables) -> str | None:
    """Why a backend does not take a problem; None where it does."""
    for requirement in backend.requirements:
        if not requirement.holds(problem, allowed):
            reason = requirement.reason
            return reason if isinstance(reason, str) else reason(problem)
    return None


FEW_QUERIES = 16  # calls with a cache and up to 16 queries are generation steps, others are prompts

SOMETHING = Requirement(
    lambda problem, allowed: not problem.empty, "needs at least one query and one key"
)
MOST_ELEMENTS = 1 << 31
# On an H200 with torch 2.11, cuDNN 9.19 computes wrong gradients for the queries and keys that lie
# behind so many elements, and torch's flash attention reads out of bounds. torch's memory-efficient
# kernel is right, so `sdpa` uses it for such tensors. Values and results count as keys and queries.
FEW_ELEMENTS = Requirement(
    lambda problem, allowed: problem.device == "cpu" or not problem.training or not problem.large,
    "has wrong gradients of tensors of 2^31 elements and more; give parts of the batch",
)
GPU = Requirement(lambda problem, allowed: problem.device == "cuda", "needs a GPU")
# For the backends that run graphs of cuDNN. They ask cuDNN itself what else it refuses.
FUSED = Requirement(
    lambda problem, allowed: allowed.fused, "switched off by NVTE_FUSED_ATTN=0; set it to 1"
)
ASKABLE = Requirement(
    lambda problem, allowed: problem.capability is not None, "cannot be asked without a GPU"
)
NO_CACHE = Requirement(
    lambda problem, allowed: not problem.cache,
    "would build a graph for each length that a cache grows to",
)
HIGH_PRECISION = Requirement(
    lambda problem, allowed: not problem.fp8,
    "does not compute in FP8; use a recipe without fp8_dpa and fp8_mha",
)
NO_BIAS = Requirement(
    lambda problem, allowed: problem.bias_type == "no_bias",
    "takes no bias and no ALiBi; use core_attention_bias_type='no_bias'",
)
NO_SINK = Requirement(
    lambda problem, allowed: problem.softmax_type == "vanilla",
    "has no sink in its softmax; use softmax_type='vanilla'",
)
NO_DROPOUT = Requirement(
    lambda problem, allowed: problem.dropout == 0.0, "has no dropout; use attention_dropout=0"
)
SOME_WEIGHTS = Requirement(
    lambda problem, allowed: problem.dropout < 1.0,
    "cannot drop everything; use attention_dropout < 1",
)
EAGER = Requirement(
    lambda problem, allowed: not problem.compiling,
    "is no operator of torch.compile; run attention outside of it",
)
FEW_QUERIES_IF_CACHED = Requirement(
    lambda problem, allowed: (
        not problem.cache or (problem.cache == "fixed" and (problem.queries or 1) <= FEW_QUERIES)
    ),
    "would build a graph for each length that a cache grows to, or that a prompt has",
)
SIZES_OF_EIGHT = Requirement(
    lambda problem, allowed: problem.key_size % 8 == 0 and problem.value_size % 8 == 0,
    "takes heads of a size divisible by 8",
)
