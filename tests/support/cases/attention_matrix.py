"""Cases of attention: how a case is made, run on a backend and compared with the definition.

`Case` describes a call. `check` runs it forward and backward and compares results and gradients
with `attention_reference`. `product` and `pairwise` make lists of cases from lists of values.
"""

import itertools
import random
from dataclasses import dataclass, field

import attention_reference as reference
import torch
from cases.attention import cu_seqlens
from torch.nn.functional import pad

from transformer_engine.pytorch.attention import DotProductAttention, attention_backends

BATCH, HEADS = 3, 4
GAP = 2  # padding tokens after each sequence if `room` is set
LEAST = 1e-6  # softmax weights above this are not rounded to 0 in any dtype
# Bounds for the norm of the error relative to the norm of the float64 result on the same inputs: a
# few roundings of the dtype (scores, weights, result) in sequence.
BOUND = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    mask_type: str = "no_mask"
    qkv_format: str = "sbhd"
    dtype: torch.dtype = torch.float32
    queries: int = 7
    keys: int = 7
    groups: int = HEADS
    size: int = 16
    value_size: int = 16
    window: tuple[int, int] | None = None
    bias: str = "no_bias"  # "slopes": ALiBi with slopes that the caller passes
    bias_shape: tuple[int, int] = (BATCH, HEADS)
    dropout: float = 0.0
    by_lengths: bool = False  # sbhd and bshd: cu_seqlens describe the padding, not masks
    room: bool = False  # thd: padding tokens between sequences
    sink: str = "vanilla"

    def __str__(self):
        default = Case()
        changed = [
            f"{name}={value}" if isinstance(value, bool | float) else str(value)
            for name, value in vars(self).items()
            if value != getattr(default, name)
        ]
        return "-".join(changed).replace("torch.", "") or "default"

    @property
    def padded(self):
        return "padding" in self.mask_type

    @property
    def lengths(self):
        """Real queries and keys of three sequences: full, shorter, and empty."""
        if not self.padded:
            return (self.queries,) * BATCH, (self.keys,) * BATCH
        query_lengths = (self.queries, self.queries - 3, 0)
        return query_lengths, query_lengths if self.alike else (self.keys, self.keys - 1, 0)

    @property
    def alike(self):
        return self.queries == self.keys

    @property
    def valid(self):
        """Whether the combination of arguments is allowed."""
        causal, packed = "causal" in self.mask_type, self.qkv_format == "thd"
        return (
            (self.padded or not packed)
            and (packed or not self.room)
            and ((self.padded and not packed) or not self.by_lengths)
            and (self.window is None or not causal or self.window[1] == 0)
            and (self.dropout == 0.0 or self.value_size >= self.keys)
        )

    def question(self, device, training=True):
        """The arguments of `attention_backends` that describe the case."""
        return {
            "num_attention_heads": HEADS,
            "kv_channels": (self.size, self.value_size),
            "num_gqa_groups": self.groups,
            "attention_dropout": self.dropout,
            "qkv_format": self.qkv_format,
            "attn_mask_type": self.mask_type,
            "window_size": self.window,
            "softmax_type": self.sink,
            "core_attention_bias_type": "alibi" if self.bias == "slopes" else self.bias,
            "core_attention_bias_shape": self.full_bias_shape,
            "core_attention_bias_requires_grad": self.full_bias_shape is not None,
            "alibi_slopes": self.bias == "slopes",
            "batch_size": None if self.qkv_format == "thd" else BATCH,
            "max_seqlen_q": self.queries,
            "max_seqlen_kv": self.keys,
            "attention_mask": self.qkv_format != "thd" and not self.by_lengths,
            "pad_between_seqs": self.room,
            "dtype": self.dtype,
            "device": device,
            "is_training": training,
        }

    @property
    def full_bias_shape(self):
        if self.bias not in ("pre_scale_bias", "post_scale_bias"):
            return None
        return (*self.bias_shape, self.queries, self.keys)


def refusals(case, device):
    """Returns what the table of requirements says of a case: `{backend: reason or None}`."""
    return attention_backends(**case.question(device))


def to_format(x, case, lengths):
    """Converts `[batch, sequence, ...]` to the case's format; thd keeps only the real tokens."""
    if case.qkv_format == "sbhd":
        return x.transpose(0, 1).contiguous()
    if case.qkv_format == "bshd":
        return x.contiguous()
    gap = GAP if case.room else 0
    unpadded = (0, 0) * (x.dim() - 2)
    parts = [
        pad(row[:length], (*unpadded, 0, gap), value=7.0)
        for row, length in zip(x, lengths, strict=True)
    ]
    return torch.cat(parts)


def from_format(x, case, lengths, longest):
    """Converts back to `[batch, sequence, ...]`; also returns the padding rows of thd.

    Rows of the first result that have no token in thd are zero.
    """
    nothing = x[:0]
    if case.qkv_format == "sbhd":
        return x.transpose(0, 1), nothing
    if case.qkv_format == "bshd":
        return x, nothing
    gap = GAP if case.room else 0
    unpadded = (0, 0) * (x.dim() - 1)
    parts = x.split([length + gap for length in lengths])
    real = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    between = [part[length:] for part, length in zip(parts, lengths, strict=True)]
    rows = [pad(part, (*unpadded, 0, longest - len(part))) for part in real]
    return torch.stack(rows), torch.cat(between)


@dataclass
class Prepared:
    """Inputs `[batch, sequence, heads, size]`, arguments of forward, seen keys and biases.

    `seen` and `biases` are arguments of `attention_reference.attention`.
    """

    inputs: list
    arguments: dict
    seen: torch.Tensor
    biases: dict = field(default_factory=dict)


def _mask_arguments(case, device):
    """Returns the arguments that describe the mask, and the keys that the reference sees."""
    query_lengths, key_lengths = case.lengths
    arbitrary, arguments = None, {}
    if case.mask_type == "arbitrary":
        arbitrary = torch.rand(BATCH, 1, case.queries, case.keys) < 0.3
        arbitrary[0, 0, 1] = True  # this query sees no key
        arguments["attention_mask"] = arbitrary.to(device)
    elif case.qkv_format == "thd" or (case.padded and case.by_lengths):
        arguments["cu_seqlens_q"] = ends = cu_seqlens(query_lengths, device)
        arguments["cu_seqlens_kv"] = ends if case.alike else cu_seqlens(key_lengths, device)
    elif case.padded:
        masks = [
            torch.tensor([[j >= n for j in range(size)] for n in side]).view(BATCH, 1, 1, size)
            for side, size in ((query_lengths, case.queries), (key_lengths, case.keys))
        ]
        masks = [mask.to(device) for mask in masks]
        arguments["attention_mask"] = masks[0] if case.alike else tuple(masks)
    if case.room:
        for name, side in (
            ("cu_seqlens_q_padded", query_lengths),
            ("cu_seqlens_kv_padded", key_lengths),
        ):
            arguments[name] = cu_seqlens([n + GAP for n in side], device)
    if case.qkv_format == "thd":
        arguments["max_seqlen_q"], arguments["max_seqlen_kv"] = max(query_lengths), max(key_lengths)
    name = "padding_causal" if "," in case.mask_type else case.mask_type
    pairs = list(zip(query_lengths, key_lengths, strict=True))
    seen = reference.seen_keys(name, case.window, case.queries, case.keys, pairs, arbitrary)
    return arguments, seen


def _bias_arguments(case, device):
    """Returns the arguments that describe the bias, and the bias of the reference."""
    if case.bias == "no_bias":
        return {}, {}
    if case.full_bias_shape is not None:
        bias = torch.randn(case.full_bias_shape).to(case.dtype)
        exact = bias.double().requires_grad_()
        arguments = {
            "core_attention_bias_type": case.bias,
            "core_attention_bias": bias.to(device).requires_grad_(),
        }
        return arguments, {case.bias.replace("_scale", ""): exact}
    arguments, slopes = {"core_attention_bias_type": "alibi"}, reference.slopes_of(HEADS)
    if case.bias == "slopes":
        module_inputs = torch.rand(HEADS)
        arguments["alibi_slopes"], slopes = module_inputs.to(device), module_inputs.double()
    pairs = list(zip(*case.lengths, strict=True))
    return arguments, {"post_bias": reference.alibi(slopes, case.queries, case.keys, pairs)}


def prepare(case, device):
    query_lengths, key_lengths = case.lengths
    arguments, seen = _mask_arguments(case, device)
    shapes = [
        (case.queries, HEADS, case.size),
        (case.keys, case.groups, case.size),
        (case.keys, case.groups, case.value_size),
    ]
    inputs = [torch.randn(BATCH, *shape).to(case.dtype) for shape in shapes]
    if case.dropout:  # one-hot values: the result is the softmax weights
        inputs[2] = torch.eye(case.keys, case.value_size).to(case.dtype)
        inputs[2] = inputs[2][None, :, None].expand(BATCH, -1, case.groups, -1).clone()
    if case.qkv_format == "thd":  # padding tokens have no value in thd
        for x, lengths in zip(inputs, (query_lengths, key_lengths, key_lengths), strict=True):
            for row, length in zip(x, lengths, strict=True):
                row[length:] = 0
    more, biases = _bias_arguments(case, device)
    return Prepared(inputs, {**arguments, **more}, seen, biases)


def norm_error(actual, expected):
    actual, expected = actual.detach().double().cpu(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def module_of(case):
    return DotProductAttention(
        HEADS,
        (case.size, case.value_size),
        case.groups,
        attention_dropout=case.dropout,
        qkv_format=case.qkv_format,
        attn_mask_type=case.mask_type,
        window_size=case.window,
    )


def _dropout_mask(case, result):
    """Returns the factors of dropout, read from a result whose values are one-hot."""
    if not case.dropout:
        return None
    weights = result.detach().double().cpu()[..., : case.keys].permute(0, 2, 1, 3)
    return (weights != 0).double() / (1 - case.dropout)


def check(case, device):
    """Runs a case on the backend that is chosen, and compares results and gradients."""
    problem = prepare(case, device)
    query_lengths, key_lengths = case.lengths
    sides = (query_lengths, key_lengths, key_lengths)
    exact = [x.double().requires_grad_() for x in problem.inputs]
    module_inputs = [
        to_format(x, case, side).to(device).requires_grad_()
        for x, side in zip(problem.inputs, sides, strict=True)
    ]
    out = module_of(case)(*module_inputs, **problem.arguments)
    assert out.dtype is case.dtype
    assert out.shape == (*module_inputs[0].shape[:-2], HEADS * case.value_size)
    unflat = out.unflatten(-1, (HEADS, case.value_size))
    result, between = from_format(unflat, case, query_lengths, case.queries)
    dropout_mask = _dropout_mask(case, result)
    expected = reference.attention(
        *exact, problem.seen, **problem.biases, dropout_mask=dropout_mask
    )
    assert norm_error(result, expected) < BOUND[case.dtype]
    blind, unseen = (~problem.seen.any(axis)[:, 0] for axis in (-1, -2))
    assert int(result.detach().cpu()[blind].count_nonzero()) == 0
    assert int(between.count_nonzero()) == 0
    if dropout_mask is not None:
        weights = reference.attention(*exact, problem.seen, **problem.biases).detach()
        seen = weights[..., : case.keys].permute(0, 2, 1, 3) > LEAST
        share = float((dropout_mask[seen] != 0).double().mean())
        assert abs(share - (1 - case.dropout)) < 5 * (0.25 / int(seen.sum())) ** 0.5

    upstream = torch.randn(expected.shape).to(case.dtype)
    expected.backward(upstream.double())
    result.backward(upstream.to(device))
    longest = (case.queries, case.keys, case.keys)
    apart = (blind, unseen, unseen)
    for x, e, side, size, none in zip(module_inputs, exact, sides, longest, apart, strict=True):
        grad, between = from_format(x.grad, case, side, size)
        assert norm_error(grad, e.grad) < 2 * BOUND[case.dtype]
        assert int(grad.cpu()[none].count_nonzero()) == 0
        assert int(between.count_nonzero()) == 0
    if "core_attention_bias" in problem.arguments:
        grad = problem.arguments["core_attention_bias"].grad
        (exact_bias,) = problem.biases.values()
        assert grad.shape == exact_bias.shape
        assert norm_error(grad, exact_bias.grad) < 2 * BOUND[case.dtype]


def product(factors):
    """Yields every valid case of a full product; `factors` is `{field: list of values}`."""
    for values in itertools.product(*factors.values()):
        case = make(dict(zip(factors, values, strict=True)))
        if case.valid:
            yield case


def pairwise(factors, tries=200):
    """Returns a small set of valid cases that covers every pair of values of two factors.

    Pairs that no valid case can have are left out. For each pair that is still missing, `tries`
    random completions are drawn with a fixed seed. The valid one that covers most of the missing
    pairs is kept.
    """
    draw = random.Random(0)
    names = list(factors)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    chosen = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        candidates = [_completed(pair, factors, draw) for _ in range(tries)]
        valid = [picks for picks in candidates if _case(picks, factors).valid]
        if valid:
            best = max(valid, key=lambda picks: len(_pairs(picks) & missing))
            missing -= _pairs(best)
            chosen.append(_case(best, factors))
    return chosen


def _completed(pair, factors, draw):
    picks = [draw.randrange(len(values)) for values in factors.values()]
    a, i, b, j = pair
    picks[a], picks[b] = i, j
    return tuple(picks)


def _pairs(picks):
    places = enumerate(picks)
    return {(a, i, b, j) for (a, i), (b, j) in itertools.combinations(places, 2)}


def _case(picks, factors):
    values = zip(factors.items(), picks, strict=True)
    return make({name: options[pick] for (name, options), pick in values})


def make(values):
    """Makes a case; `lengths` is a pair (queries, keys), `sizes` a pair (size, value_size)."""
    values = dict(values)
    for name, fields in (("lengths", ("queries", "keys")), ("sizes", ("size", "value_size"))):
        values.update(zip(fields, values.pop(name, ()), strict=False))
    return Case(**values)
