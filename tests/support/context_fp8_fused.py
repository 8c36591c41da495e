"""Context-parallel attention in FP8 whose parts cuDNN computes.

On CPUs, `fake_cudnn_fp8` stands in for cuDNN's kernels.
"""

from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
from cases import fake_cudnn_fp8
from context_fp8 import STEPS, in_fp8, read, relative
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import core_attention
from transformer_engine.pytorch.attention.backends import choice, cudnn_fp8, unfused
from transformer_engine.pytorch.attention.context import codes
from transformer_engine.pytorch.distributed import shard_sequence

# The last field is the softmax type. With "off-by-one" a sink is merged with cuDNN's result.
CASES = [
    *[
        ("p2p", mask, qkv_format, "vanilla")
        for mask in ("causal", "no_mask")
        for qkv_format in ("bshd", "sbhd")
    ],
    ("all_gather", "causal", "bshd", "vanilla"),
    ("p2p", "causal", "bshd", "off-by-one"),
]
TOKENS, HEADS, GROUPS, SIZE = 256, 4, 2, 64
KERNELS = ("fp8_attention_forward", "attention_backward")


def _cudnn_everywhere(stack):
    """Chooses the cuDNN backend, and replaces its kernels by stand-ins."""

    def chosen(device, dtype, recorded, call):
        return cudnn_fp8.BACKEND if call.sink.type == "vanilla" else unfused.BACKEND

    for module in (core_attention, codes, choice):
        stack.enter_context(patch.object(module, "choose", chosen))
    for name in KERNELS:
        stack.enter_context(patch.object(cudnn_fp8, name, getattr(fake_cudnn_fp8, name)))


def fused_outcomes(rank):
    """Returns for each case and step: errors on ranks and in one process, and whether scales agree.

    Errors are those of result and gradients against attention in high precision. The last entry is
    the number of parts and calls that cuDNN has computed.
    """
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    found, computed = {}, []
    with ExitStack() as stack:
        if torch.device(here()).type != "cuda":
            _cudnn_everywhere(stack)
        forward = cudnn_fp8.fp8_attention_forward

        def counted(*arguments):
            computed.append(arguments[0].shape)
            return forward(*arguments)

        stack.enter_context(patch.object(cudnn_fp8, "fp8_attention_forward", counted))
        for case in CASES:
            found[case] = _compare(case, alone)
    return found, len(computed)


def _compare(case, alone):
    comm, mask, qkv_format, softmax = case
    shared, single = (
        te.DotProductAttention(
            *(HEADS, SIZE, GROUPS),
            qkv_format=qkv_format,
            attn_mask_type=mask,
            softmax_type=softmax,
        )
        for _ in range(2)
    )
    exact = _exact(mask, qkv_format, softmax)
    shared.set_context_parallel_group(dist.group.WORLD, None, None, comm)
    dim, steps = (1 if qkv_format == "bshd" else 0), []

    def cut(x):
        return shard_sequence(x, dist.group.WORLD, dim)

    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        lead = (2, TOKENS) if qkv_format == "bshd" else (TOKENS, 2)
        shapes = [(*lead, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
        drawn = [torch.randn(shape, generator=generator).to(here()) for shape in shapes]
        *inputs, grad = [x.bfloat16() for x in drawn]
        ours = _step(in_fp8(shared), [cut(x) for x in inputs], cut(grad))
        theirs = _step(in_fp8(single, alone), inputs, grad)
        wanted = [cut(x) for x in _step(exact, [x.float() for x in inputs], grad.float())]
        steps.append(
            (
                [relative(x, y) for x, y in zip(ours, wanted, strict=True)],
                [relative(cut(x), y) for x, y in zip(theirs, wanted, strict=True)],
                read(shared, "qkv") == read(single, "qkv"),
            )
        )
    return steps


def _exact(mask, qkv_format, softmax):
    """Returns attention in torch. The sink is a key and a value of zeros that every query sees."""
    sinks = int(softmax == "off-by-one")

    def heads_first(x):
        return x.transpose(1, 2) if qkv_format == "bshd" else x.permute(1, 2, 0, 3)

    def call(*inputs):
        q, k, v = map(heads_first, inputs)
        k, v = (torch.nn.functional.pad(x, (0, 0, sinks, 0)) for x in (k, v))
        seen = torch.ones(TOKENS, TOKENS + sinks, dtype=torch.bool, device=q.device)
        out = torch.nn.functional.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=seen.tril(sinks) if mask == "causal" else seen,
            enable_gqa=True,
        )
        places = (0, 2, 1, 3) if qkv_format == "bshd" else (2, 0, 1, 3)
        return out.permute(places).flatten(-2)

    return call


def _step(call, inputs, grad):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    out.backward(grad.flatten(-2))
    return [out.detach(), *[x.grad for x in leaves]]
