"""Compares context-parallel attention on a group of ranks with attention of whole sequences."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import shard_sequence

HEADS, SIZE, BATCH, TOKENS = 4, 16, 2, 16


@dataclass(frozen=True)
class Case:
    comm: str = "p2p"
    mask: str = "causal"
    format: str = "bshd"
    dtype: torch.dtype = torch.float32
    groups: int = HEADS
    window: tuple[int, int] | None = None
    bias: str = "no_bias"
    bias_shape: tuple[int, int] = (1, HEADS)
    softmax: str = "vanilla"
    keys: int = TOKENS
    value_size: int = SIZE
    room: bool = False
    by_mask: bool = False
    checkpoint: bool = False

    def __str__(self):
        other = Case()
        parts = [self.comm, self.mask, self.format]
        for name in list(self.__dataclass_fields__)[3:]:
            if getattr(self, name) != getattr(other, name):
                parts.append(f"{name}={getattr(self, name)}")
        return "-".join(parts)


@dataclass
class Problem:
    """A call of attention on whole sequences.

    Attributes:
        inputs: query, key and value.
        arguments: arguments of the call that are equal on all ranks.
        rows: arguments that are sharded along the queries: the arbitrary mask and the bias.
        masks: padding masks of queries and keys, sharded along the tokens.
        starts: for thd, the offset in memory at which each sequence begins.
    """

    inputs: list
    arguments: dict
    rows: dict
    masks: tuple
    starts: torch.Tensor | None


def ends_of(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def problem_of(case, ranks):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([TOKENS - 3, TOKENS // 2 + 1])
    key_lengths = lengths if case.keys == TOKENS else torch.tensor([case.keys, case.keys // 2])
    sides = ((TOKENS, HEADS, SIZE), (case.keys, case.groups, SIZE))
    shapes = [*sides, (case.keys, case.groups, case.value_size)]
    arguments, rows, masks, starts = {}, {}, (), None
    if case.format == "thd":
        unit = 2 * ranks
        whole = (lengths + unit - 1) // unit * unit
        if not case.room:
            lengths = key_lengths = whole
        starts = ends_of(whole)
        shapes = [(int(starts[-1]), *shape[1:]) for shape in shapes]
    else:
        lead = (lambda n: (n, BATCH)) if case.format == "sbhd" else (lambda n: (BATCH, n))
        shapes = [(*lead(n), *rest) for n, *rest in shapes]
    inputs = [torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes]
    if "padding" in case.mask:
        if case.by_mask:
            masks = tuple(
                (torch.arange(n) >= real[:, None])[:, None, None]
                for n, real in ((TOKENS, lengths), (case.keys, key_lengths))
            )
        else:
            ends = ends_of(lengths)
            key_ends = ends if key_lengths is lengths else ends_of(key_lengths)
            arguments |= {"cu_seqlens_q": ends, "cu_seqlens_kv": key_ends}
    if case.room:
        arguments |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    if case.mask == "arbitrary":
        mask = torch.rand(BATCH, 1, TOKENS, case.keys, generator=generator) < 0.4
        mask[:, :, 5] = True  # this query sees no key
        rows["attention_mask"] = mask
    if case.bias == "alibi":
        arguments["core_attention_bias_type"] = "alibi"
    elif case.bias != "no_bias":
        arguments["core_attention_bias_type"] = case.bias
        shape = (*case.bias_shape, TOKENS, case.keys)
        rows["core_attention_bias"] = torch.randn(shape, generator=generator).to(case.dtype)
    inputs = [x.to(here()) for x in inputs]
    found = [
        {name: x.to(here()) if isinstance(x, torch.Tensor) else x for name, x in group.items()}
        for group in (arguments, rows)
    ]
    if "cu_seqlens_q" in arguments and arguments["cu_seqlens_q"] is arguments["cu_seqlens_kv"]:
        found[0]["cu_seqlens_kv"] = found[0]["cu_seqlens_q"]
    masks = tuple(mask.to(here()) for mask in masks)
    return Problem(inputs, *found, masks, None if starts is None else starts.to(here()))


def module_of(case):
    module = te.DotProductAttention(
        HEADS,
        (SIZE, case.value_size),
        num_gqa_groups=case.groups,
        qkv_format=case.format,
        attn_mask_type=case.mask,
        window_size=case.window,
        softmax_type=case.softmax,
    ).to(here())
    if case.softmax == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.linspace(-1, 1, HEADS))
    return module


def run(module, inputs, arguments, grad, case):
    """Returns the result, and the gradients of inputs, bias and sink."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    bias = arguments.get("core_attention_bias")
    if bias is not None:
        bias = bias.detach().clone().requires_grad_()
        arguments = {**arguments, "core_attention_bias": bias}
    out = module(*leaves, checkpoint_core_attention=case.checkpoint, **arguments)
    out.backward(grad)
    found = [out.detach(), *[x.grad for x in leaves]]
    if bias is not None:
        found.append(bias.grad)
    if case.softmax == "learnable":
        found.append(module.softmax_offset.grad)
    return found


def groups_of(case, size):
    """Returns `cp_group`: for "a2a+p2p", the groups of neighbouring pairs and of rings."""
    if case.comm != "a2a+p2p":
        return dist.group.WORLD
    rank, pairs = dist.get_rank(), size // 2
    exchange = [dist.new_group([2 * i, 2 * i + 1]) for i in range(pairs)]
    rings = [dist.new_group([2 * i + j for i in range(pairs)]) for j in range(2)]
    return [exchange[rank // 2], rings[rank % 2]]


def errors(case, group):
    """Returns the error of each result, relative to the norm of the result on whole sequences."""
    whole = problem_of(case, dist.get_world_size())
    exact = replace(case, dtype=torch.float32, checkpoint=False)
    arguments = {**whole.arguments, **{name: _exact(x) for name, x in whole.rows.items()}}
    if whole.masks:
        arguments["attention_mask"] = whole.masks
    dim = {"sbhd": 0, "bshd": 1, "thd": 0}[case.format]

    def cut(x):
        return shard_sequence(x, group, dim, cu_seqlens=whole.starts)

    module = module_of(exact)
    like = module(*[x.float() for x in whole.inputs], **arguments)
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(6))
    grad = grad.to(here(), case.dtype)
    expected = run(module, [x.float() for x in whole.inputs], arguments, grad.float(), exact)

    rows = {name: shard_sequence(x, group, 2) for name, x in whole.rows.items()}
    own = {**whole.arguments, **rows}
    if whole.masks:
        own["attention_mask"] = tuple(shard_sequence(x, group, 3) for x in whole.masks)
    module = module_of(case)
    module.set_context_parallel_group(group, None, None, case.comm)
    found = run(module, [cut(x) for x in whole.inputs], own, cut(grad), case)
    wanted = [cut(x) for x in expected[:4]]
    if whole.rows.get("core_attention_bias") is not None:
        wanted.append(shard_sequence(expected[4], group, 2))
    if case.softmax == "learnable":
        wanted.append(expected[-1])
        dist.all_reduce(found[-1])
    assert all(x.dtype is case.dtype for x in found[:4])
    return [
        float((x.double() - y.double()).norm() / max(y.double().norm(), 1e-9))
        for x, y in zip(found, wanted, strict=True)
    ]


def _exact(x):
    return x.float() if x.is_floating_point() else x


def outcomes(rank, cases, result_of=errors):
    """Returns `result_of` each case, or the text of the exception that it raised."""
    size = dist.get_world_size()
    made, found = {}, {}
    for case in cases:
        kind = case.comm == "a2a+p2p"
        if kind not in made:
            made[kind] = groups_of(case, size)
        try:
            found[str(case)] = result_of(case, made[kind])
        except Exception as error:
            found[str(case)] = f"{type(error).__name__}: {error}"
    return found
