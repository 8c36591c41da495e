"""What context-parallel ranks refuse before they send anything, and how they choose backends."""

import os
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import choice
from transformer_engine.pytorch.attention.backends.backend import refusal

HEADS = 4


def attention(comm, group=None, sizes=8, **settings):
    module = te.DotProductAttention(HEADS, sizes, name="attend", qkv_format="bshd", **settings)
    module.set_context_parallel_group(group or dist.group.WORLD, None, None, comm)
    return module


def message(call, *arguments, **keywords):
    """Returns the first line of the error of a call."""
    try:
        call(*arguments, **keywords)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "no error"


def tensors(*shape, sizes=(8, 8, 8)):
    return [torch.ones(*shape, HEADS, size, device=here()) for size in sizes]


def ends(*numbers, side=("q", "kv")):
    found = torch.tensor(numbers, dtype=torch.int32, device=here())
    return {f"cu_seqlens_{name}": found for name in side}


def without_backends(rank):
    """Returns the errors of calls that no backend takes, around a call that a backend takes.

    The group would time out after five seconds.
    """
    group, found = dist.new_group([0, 1], timeout=timedelta(seconds=5)), {}
    switched_off = {"NVTE_UNFUSED_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}
    for comm, softmax in (("p2p", "vanilla"), ("all_gather", "vanilla"), ("a2a", "off-by-one")):
        module = attention(comm, group, (8, 4), window_size=(2, 0), softmax_type=softmax)
        inputs = tensors(2, 6, sizes=(8, 8, 4))
        with patch.dict(os.environ, switched_off):
            first = message(module, *inputs)
        between = message(module, *inputs)
        with patch.dict(os.environ, switched_off):
            found[comm] = (first, between, message(module, *inputs))
    return found


def packed_biases(rank):
    """Returns the errors of biases of packed sequences, whose tokens ranks share unevenly."""
    bias, found = torch.ones(1, 1, 12, 24, device=here()), {}
    for comm in ("p2p", "all_gather", "a2a"):
        module = attention(comm, attn_mask_type="padding")
        found[comm] = message(
            *(module, *tensors(12)),
            qkv_format="thd",
            **ends(0, 4, 24),
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=bias,
        )
    return found


def learned_biases(rank):
    """Returns whether the bias was learned in each choice of a backend."""
    found = {}
    for comm in ("p2p", "all_gather", "a2a"):
        bias = torch.ones(1, HEADS, 10, 20, device=here(), requires_grad=True)
        module, learned = attention(comm, attn_mask_type="no_mask"), []

        def refused(backend, problem, allowed, learned=learned):
            learned.append(problem.bias_grad)
            return refusal(backend, problem, allowed)

        with patch.object(choice, "refusal", refused):
            module(
                *tensors(3, 10),
                core_attention_bias_type="post_scale_bias",
                core_attention_bias=bias,
            )
        found[comm] = learned
    return found


def misfits():
    """Returns arguments that do not fit queries `[2, 4, 4, 8]` of each of two ranks, by name."""
    mask = partial(torch.zeros, dtype=torch.bool, device=here())
    bias = {"core_attention_bias_type": "post_scale_bias"}
    padding, arbitrary = {"attn_mask_type": "padding"}, {"attn_mask_type": "arbitrary"}
    packed = padding | {"qkv_format": "thd"}
    return {
        "bias heads": bias | {"core_attention_bias": torch.ones(1, 3, 4, 8, device=here())},
        "bias batch": bias | {"core_attention_bias": torch.ones(3, 4, 4, 8, device=here())},
        "mask heads": arbitrary | {"attention_mask": mask(1, 3, 4, 8)},
        "no mask": arbitrary,
        "float": arbitrary | {"attention_mask": mask(1, 1, 4, 8).float()},
        "padding": padding | {"attention_mask": mask(3, 1, 1, 4)},
        "batch": padding | ends(0, 2, 4, 6),
        "long": padding | ends(0, 9, 12),
        "falling": padding | ends(0, 5, 4),
        "packed batch": packed | ends(0, 4, 16, side=("q",)) | ends(0, 16, side=("kv",)),
        "slopes": {
            "core_attention_bias_type": "alibi",
            "alibi_slopes": torch.ones(3, device=here()),
        },
    }


def misfits_are_refused(rank):
    """Returns the error of each call in `misfits`, and that of a call that follows.

    The calls follow one whose mask or bias has the same shape. The group would time out after five
    seconds.
    """
    group, found = dist.new_group([0, 1], timeout=timedelta(seconds=5)), {}
    for comm in ("p2p", "all_gather", "a2a"):
        module = attention(comm, group, attn_mask_type="no_mask")
        fits = torch.zeros(1, 1, 4, 8, dtype=torch.bool, device=here())
        module(*tensors(2, 4), attn_mask_type="arbitrary", attention_mask=fits)
        for name, arguments in misfits().items():
            inputs = tensors(8) if name.startswith("packed") else tensors(2, 4)
            later = partial(message, module, *tensors(2, 4))
            found[f"{name} {comm}"] = message(module, *inputs, **arguments), later()
    return found


def disagreements_on_tensors(rank):
    """Returns errors of calls with lengths, masks and biases that fit on the first rank alone.

    Each entry also has the error of a call that follows.
    """
    mask = torch.zeros(1, 1, 4, 8, dtype=torch.bool, device=here())
    bias, padding = torch.zeros(1, 1, 4, 8, device=here()), {"attn_mask_type": "padding"}
    packed = padding | {"qkv_format": "thd"}
    pairs = {
        "lengths": (padding | ends(0, 3, 5), padding | ends(0, 4, 5)),
        "long": (padding | ends(0, 3, 5), padding | ends(0, 9, 11)),
        "uneven": (packed | ends(0, 8, 16), packed | ends(0, 6, 16)),
        "mask": [
            {"attn_mask_type": "arbitrary", "attention_mask": x} for x in (mask, mask.float())
        ],
        "bias": [
            {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": x}
            for x in (bias, bias.half())
        ],
    }
    group, found = dist.new_group([0, 1], timeout=timedelta(seconds=5)), {}
    for comm in ("p2p", "all_gather", "a2a"):
        module = attention(comm, group, attn_mask_type="no_mask")
        for name, pair in pairs.items():
            inputs = tensors(8) if name == "uneven" else tensors(2, 4)
            text = message(module, *inputs, **pair[rank])
            found[f"{name} {comm}"] = text, message(module, *tensors(2, 4))
    return found


def masks_of_few_dimensions(rank):
    """Returns whether masks without dimensions of queries or keys hide what wider ones hide."""
    found = []
    for comm in ("p2p", "all_gather", "a2a"):
        module = attention(comm, attn_mask_type="arbitrary")
        inputs = [torch.randn(2, 4, HEADS, 8, device=here()) for _ in range(3)]
        for hidden in (torch.tensor(False), torch.arange(8) < 3):
            wide = hidden.expand(1, 1, 4, 8).contiguous().to(here())
            pair = [module(*inputs, attention_mask=mask) for mask in (hidden.to(here()), wide)]
            found.append(torch.allclose(*pair))
    return found


def without_sequences(rank):
    """Returns result and gradients of packed tokens that belong to no sequence."""
    found = []
    for comm in ("p2p", "all_gather", "a2a"):
        module = attention(comm, attn_mask_type="padding_causal")
        leaves = [x.requires_grad_() for x in tensors(4)]
        out = module(*leaves, qkv_format="thd", **ends(0))
        out.sum().backward()
        found += [out.detach(), *[x.grad for x in leaves]]
    return found


SCENARIOS = (
    without_backends,
    packed_biases,
    learned_biases,
    misfits_are_refused,
    disagreements_on_tensors,
    masks_of_few_dimensions,
    without_sequences,
)
