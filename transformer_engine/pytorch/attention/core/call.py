"""`Call`: the settings and tensors of a call of attention, in a form that all backends take.

Each forward makes a `Call` from its arguments and the settings of the module. Formats, sizes and
the mask are in a `CallShape`, which equal calls share, so that plans and choices of backends can be
looked up by it. `Call.settings` returns a call without tensors, which a backward can keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transformer_engine.pytorch.attention.core import formats
from transformer_engine.pytorch.attention.core.casts import Casts
from transformer_engine.pytorch.attention.masks.masks import (
    Mask,
    MaskRule,
    Window,
    build_mask,
    mask_rule,
)
from transformer_engine.pytorch.capture import memoize

if TYPE_CHECKING:
    from transformer_engine.pytorch.attention.context.group import ContextGroup

AttentionMask = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")  # of context parallel ranks


class Sequences(NamedTuple):
    """Where the sequences of queries, or those of keys and values, are; see `formats.py`.

    `longest` is the `max_seqlen` that the user gives.
    """

    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_padded: torch.Tensor | None = None
    longest: int | None = None

    @property
    def starts(self) -> torch.Tensor | None:
        """Where each thd sequence begins in memory, and where the last one ends."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    def checked(self, parameter: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`cu_seqlens` and `cu_seqlens_padded`, after checks that raise ValueError or TypeError."""
        cu_seqlens = formats.check_cu_seqlens(self.cu_seqlens, parameter)
        if self.cu_seqlens_padded is not None:
            formats.check_starts(self.cu_seqlens_padded, cu_seqlens, parameter)
        if isinstance(self.longest, float):
            raise TypeError(
                f"[attention] expected {formats.name_of_longest(parameter)} to be an int, got"
                f" {self.longest}"
            )
        return cu_seqlens, self.cu_seqlens_padded


_WHOLE = Sequences()


def sequences_of(
    cu_seqlens: torch.Tensor | None, cu_seqlens_padded: torch.Tensor | None, longest: int | None
) -> Sequences:
    """`Sequences` of these arguments; the same object for all calls in which all are None."""
    if cu_seqlens is None and cu_seqlens_padded is None and longest is None:
        return _WHOLE
    return Sequences(cu_seqlens, cu_seqlens_padded, longest)


class Bias(NamedTuple):
    """What is added to the scores: a tensor, or the distances of ALiBi times slopes."""

    type: str = "no_bias"
    tensor: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


NO_BIAS = Bias()


def check_bias_type(name: str) -> str:
    """Return the type; for an unknown one, raise a ValueError that lists the types."""
    if name not in BIAS_TYPES:
        known = ", ".join(BIAS_TYPES)
        raise ValueError(
            f"[attention] expected core_attention_bias_type in {{{known}}}, got {name!r}"
        )
    return name


def bias_of(type: str, tensor: torch.Tensor | None, slopes: torch.Tensor | None) -> Bias:
    """The bias of a call, after checks of all but its shape; `NO_BIAS` if there is none."""
    if type == "no_bias" and tensor is None and slopes is None:
        return NO_BIAS
    check_bias_type(type)
    takes_bias = type in ("pre_scale_bias", "post_scale_bias")
    for name, value, wanted in (
        ("core_attention_bias", tensor, takes_bias),
        ("alibi_slopes", slopes, type == "alibi" and slopes is not None),
    ):
        if (value is not None) != wanted:
            raise ValueError(
                f"[attention] expected {name} to be {'a tensor' if wanted else 'None'} with"
                f" core_attention_bias_type={type!r}, got {'None' if wanted else 'a tensor'}"
            )
    if tensor is not None:
        tensor = _with_four_dimensions(tensor)
    return Bias(type, tensor, slopes)


def _with_four_dimensions(bias: torch.Tensor) -> torch.Tensor:
    """The bias with four dimensions. Refuses bool masks: True would add 1 to the scores."""
    if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
        kind = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise TypeError(
            f"[attention] expected core_attention_bias to be a tensor of floating point, got {kind}"
        )
    return bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias


SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class Sink(NamedTuple):
    """The kind of softmax, and the score of its sink: one more key, which has no value.

        vanilla       exp(s_j) / sum_k exp(s_k)
        off-by-one    exp(s_j) / (1 + sum_k exp(s_k))
        learnable     exp(s_j) / (exp(offset_h) + sum_k exp(s_k)), a learned offset per head

    Attributes:
        type: one of `SOFTMAX_TYPES`.
        offset: `[heads]`; None for `vanilla`.
    """

    type: str = "vanilla"
    offset: torch.Tensor | None = None


NO_SINK = Sink()


def check_softmax_type(name: str) -> str:
    """Return the type; for an unknown one, raise a ValueError that lists the types."""
    if name not in SOFTMAX_TYPES:
        raise ValueError(
            f"[DotProductAttention] expected softmax_type in {{{', '.join(SOFTMAX_TYPES)}}},"
            f" got {name!r}"
        )
    return name


def check_comm_type(name: str, where: str = "") -> None:
    """Raise ValueError for an unknown type; `where` ends the message."""
    if name not in COMM_TYPES:
        raise ValueError(
            f"[DotProductAttention] expected cp_comm_type in {{{', '.join(COMM_TYPES)}}}, got"
            f" {name!r}{where}"
        )


class Dropout(NamedTuple):
    """Dropout of attention weights.

    Attributes:
        p: probability of dropping a weight.
        tracker: RNG states that random numbers are drawn from; None for torch's generator.
        seed: seed of this call, for backends that take one; see `Backend.draw_seed`.
    """

    p: float = 0.0
    tracker: Any = None
    seed: torch.Tensor | None = None


NO_DROPOUT = Dropout()


def elements_of(rows: tuple[int, int], heads: tuple[int, int], sizes: tuple[int, int]) -> int:
    """The number of elements of the largest tensor of a call: queries, keys, values or the result.

    Args:
        rows: tokens of queries, and of keys, of all sequences.
        heads: number of query heads, and of key and value heads.
        sizes: size of a head of queries and keys, and of values.
    """
    return max(rows[0] * heads[0], rows[1] * heads[1]) * max(sizes)


@dataclass(frozen=True, eq=False, slots=True)
class CallShape:
    """Settings and shapes of a call; equal calls share one object.

    Attributes:
        qkv_format: format of all tensors.
        rule: mask type and window.
        band: the mask, if it depends on no tensor; None for padding and arbitrary masks.
        heads: number of query heads.
        groups: number of key and value heads.
        key_size: size of a head of queries and keys.
        value_size: size of a head of values.
        batch: number of sequences; None for thd.
        queries: tokens of a query sequence with its padding; for thd, tokens of all sequences.
        keys: the same for keys and values.
    """

    qkv_format: str
    rule: MaskRule
    band: Mask | None
    heads: int
    groups: int
    key_size: int
    value_size: int
    batch: int | None
    queries: int
    keys: int

    @property
    def elements(self) -> int:
        """See `elements_of`."""
        batch = 1 if self.batch is None else self.batch
        heads, sizes = (self.heads, self.groups), (self.key_size, self.value_size)
        return elements_of((batch * self.queries, batch * self.keys), heads, sizes)


@memoize
def call_shape(
    qkv_format: str,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    shapes: formats.Shapes,
    mask_type: str,
    window: Window | None,
    bottom_right: bool | None,
) -> CallShape:
    """Check settings and shapes; `heads`, `sizes` and `shapes` as in `formats.check_shapes`."""
    formats.check_format(qkv_format)
    rule = mask_rule(mask_type, window, bottom_right)
    formats.check_shapes(qkv_format, heads, sizes, shapes)
    formats.check_mask_of_format(qkv_format, rule.type.padding, mask_type)
    return shape_of(qkv_format, heads, sizes, shapes, rule)


def shape_of(
    qkv_format: str,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    shapes: formats.Shapes,
    rule: MaskRule,
) -> CallShape:
    """The `CallShape` of checked arguments."""
    sequence = 1 if qkv_format == "bshd" else 0
    queries, keys = shapes[0][sequence], shapes[1][sequence]
    band = None
    if not (rule.type.padding or rule.type.arbitrary):
        band = build_mask(rule, queries, keys)
    batch = None if qkv_format == "thd" else shapes[0][1 - sequence]
    return CallShape(qkv_format, rule, band, *heads, *sizes, batch, queries, keys)


class CallArguments(NamedTuple):
    """Arguments of a call; those that the user left out have the module's settings."""

    attention_mask: AttentionMask | None
    qkv_format: str
    query_sequences: Sequences
    key_sequences: Sequences
    mask_type: str
    window: Window | None
    bottom_right: bool | None
    bias: Bias
    checkpoint: bool


class CallTensors(NamedTuple):
    """All tensors of a call except those of `casts`, which belong to the module."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None  # the second one of a pair of masks


TENSORS = len(CallTensors._fields)
_NO_TENSORS = CallTensors()


class Call(NamedTuple):
    """Settings and tensors of a call of attention.

    `training` is the module's mode. The choice of a backend reads it, because the first forward of
    a checkpoint needs no gradients, but must use the same backend as the recompute.
    """

    shape: CallShape
    attention_mask: AttentionMask | None
    query_sequences: Sequences
    key_sequences: Sequences
    bias: Bias
    scale: float
    dropout: Dropout
    checkpoint: bool
    sink: Sink = NO_SINK
    cache: str = ""
    training: bool = False
    casts: Casts | None = None  # of FP8 attention
    context: ContextGroup | None = None  # ranks that share the sequence
    part: bool = False  # the keys are only some of those of the softmax, see `Parts`
    max_logit: bool = False  # `max_logit` follows, for which ranks send keys once more

    @property
    def same_sequences(self) -> bool:
        """Queries and keys are known to have the same lengths."""
        pairs = zip(self.query_sequences, self.key_sequences, strict=True)
        return all(a is b for a, b in pairs)

    @property
    def has_tensors(self) -> bool:
        """Whether `tensors` may have any that is not None."""
        return not (
            self.attention_mask is None
            and self.query_sequences.cu_seqlens is None
            and self.key_sequences.cu_seqlens is None
            and self.bias is NO_BIAS
            and self.sink is NO_SINK
        )

    @property
    def is_plain(self) -> bool:
        """Whether `plain_call` would make this call. Sizes, which may be symbols, do not matter."""
        longest = (self.query_sequences.longest, self.key_sequences.longest)
        return not (
            self.has_tensors
            or longest != (None, None)
            or self.dropout is not NO_DROPOUT
            or self.checkpoint
            or self.cache
            or self.casts is not None
            or self.context is not None
            or self.part
        )

    @property
    def tensors(self) -> CallTensors:
        """The tensors of the call."""
        if not self.has_tensors:
            return _NO_TENSORS
        mask = self.attention_mask
        masks = mask if isinstance(mask, tuple | list) else (mask,)
        if masks is mask and len(masks) != 2:
            raise ValueError(
                "[attention] expected attention_mask to be one mask or a pair, of queries and of"
                f" keys, got a {type(mask).__name__} of {len(masks)}"
            )
        sequences = (*self.query_sequences[:2], *self.key_sequences[:2])
        return CallTensors(*sequences, self.bias.tensor, self.bias.slopes, self.sink.offset, *masks)

    def with_tensors(self, tensors: CallTensors, seed: torch.Tensor | None = None) -> Call:
        """The same call with these tensors, and the seed of dropout."""
        call = self
        if seed is not None:
            call = call._replace(dropout=self.dropout._replace(seed=seed))
        if not (self.has_tensors or any([x is not None for x in tensors])):
            return call
        mask: Any = tensors.mask
        if isinstance(self.attention_mask, tuple | list):
            mask = tensors.mask, tensors.key_mask
        ends_q, starts_q, ends_kv, starts_kv = tensors[:4]
        return call._replace(
            attention_mask=mask,
            query_sequences=Sequences(ends_q, starts_q, self.query_sequences.longest),
            key_sequences=Sequences(ends_kv, starts_kv, self.key_sequences.longest),
            bias=NO_BIAS if self.bias is NO_BIAS else Bias(self.bias.type, *tensors[4:6]),
            sink=NO_SINK if self.sink is NO_SINK else Sink(self.sink.type, tensors.sink),
        )

    def settings(self) -> Call:
        """The call without tensors, so that a backward can keep it."""
        call = self if self.casts is None else self._replace(casts=self.casts.settings())
        return call.with_tensors(_NO_TENSORS) if self.has_tensors else call


def plain_call(shape: CallShape, scale: float, training: bool) -> Call:
    """A call of attention without tensors and dropout."""
    alone = (None, _WHOLE, _WHOLE, NO_BIAS)
    return Call(shape, *alone, scale, NO_DROPOUT, checkpoint=False, training=training)
