"""Scenarios of two context-parallel ranks beyond single calls: layers, helpers, errors."""

from datetime import timedelta
from functools import partial
from unittest.mock import patch

import context_backends
import torch
import torch.distributed as dist
from context_cases import outcomes
from context_copies import changed_ends, copies
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.distributed import gather_sequence, shard_sequence
from transformer_engine.pytorch.parallel.meeting import Meeting

ENDS = torch.tensor([0, 8, 24], dtype=torch.int32)
CASES = (("sbhd", "self", "p2p"), ("bshd", "decoder", "all_gather"), ("thd", "self", "a2a"))


def seeded(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(here())


def world():
    return dist.group.WORLD


def relative(x, y):
    x, y = x.detach(), y.detach()
    return float((x.double() - y.double()).norm() / y.double().norm())


def layers(rank):
    """Compares context-parallel layers with the layer on whole sequences.

    Returns for each case the errors of the result and of all gradients, whether a call without
    gradients gives the same result, and whether the layer ran as one autograd node.
    """
    found = {}
    for qkv_format, kind, comm in CASES:
        torch.manual_seed(3)
        mask = "padding_causal" if qkv_format == "thd" else "causal"
        layer = te.TransformerLayer(
            *(32, 64, 4),
            **{"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            layer_type="decoder" if kind == "decoder" else "encoder",
            self_attn_mask_type=mask,
            attn_input_format=qkv_format,
        )
        angles = te.RotaryPositionEmbedding(8)(32)
        shape = {"thd": (24, 32), "sbhd": (16, 2, 32), "bshd": (2, 16, 32)}[qkv_format]
        dim, ends = (1 if qkv_format == "bshd" else 0), (ENDS if qkv_format == "thd" else None)
        more = {} if ends is None else {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        x, grad, encoded = (seeded(*shape, seed=seed) for seed in (1, 2, 4))

        def run(cut, layer=layer, kind=kind, angles=angles, more=more, x=x, encoded=encoded):
            leaf = cut(x).clone().requires_grad_()
            cross = {"encoder_output": cut(encoded)} if kind == "decoder" else {}
            return leaf, layer(leaf, rotary_pos_emb=angles, **cross, **more)

        def cut(x, dim=dim, ends=ends):
            return shard_sequence(x, world(), dim, cu_seqlens=ends)

        leaf, out = run(lambda x: x)
        out.backward(grad)
        expected = [cut(out), cut(leaf.grad), *[p.grad for p in layer.parameters()]]
        layer.zero_grad()
        layer.set_context_parallel_group(world(), [0, 1], None, comm)
        for _ in range(2):  # the second time from a recording
            layer.zero_grad()
            leaf, out = run(cut)
            out.backward(cut(grad))
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
        results = [out, leaf.grad, *[p.grad for p in layer.parameters()]]
        with torch.no_grad():
            alone = run(cut)[1]
        errors = [relative(a, b) for a, b in zip(results, expected, strict=True)]
        # The exact gradient of a key bias is zero: only rounding errors are left.
        names = ["out", "grad", *[name for name, _ in layer.named_parameters()]]
        errors = {n: e for n, e in zip(names, errors, strict=True) if "key_bias" not in n}
        fused = [x.chain is not None for x in layer._fused.values()]
        found[qkv_format] = (errors, torch.equal(alone, out), fused)
    return found


def helpers(rank):
    """Returns the results of `shard_sequence` and `gather_sequence`, and their gradients."""
    whole = torch.arange(8.0, requires_grad=True)
    own = shard_sequence(whole, world())
    (own * torch.arange(1.0, 5.0)).sum().backward()
    leaf = own.detach().requires_grad_()
    gathered = gather_sequence(leaf, world())
    (gathered * (rank + 1)).sum().backward()
    packed = shard_sequence(torch.arange(24), world(), cu_seqlens=ENDS)
    rows = torch.arange(16).view(2, 8)
    pair = shard_sequence([rows, rows.t()], world(), [1, 0])
    return {
        "own": own.detach(),
        "gradient": whole.grad,
        "gathered": gathered.detach(),
        "sum": leaf.grad,
        "packed": packed,
        "back": gather_sequence(packed, world(), cu_seqlens=ENDS),
        "pair": pair,
        "uneven": message(lambda: shard_sequence(torch.arange(6), world())),
        "uneven packed": message(
            lambda: shard_sequence(torch.arange(24), world(), cu_seqlens=ENDS - ENDS // 24 * 2)
        ),
    }


def helpers_refuse(rank):
    """Returns the errors of the helpers for arguments of wrong types or lengths."""
    x = torch.arange(8)
    return {
        "x": message(lambda: shard_sequence(None, world())),
        "gathered": message(lambda: gather_sequence([x], world())),
        "float": message(lambda: shard_sequence(x, world(), 0.0)),
        "ends": message(lambda: shard_sequence(x, world(), cu_seqlens=[0, 8])),
        "one dimension": message(lambda: shard_sequence([x, x], world(), 0)),
        "too few": message(lambda: shard_sequence([x, x], world(), [0])),
    }


def message(run):
    """Returns the exception of a call as one line of text."""
    try:
        run()
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def attention(comm="p2p", heads=4, group=None, ranks=None, stream=None, **settings):
    module = te.DotProductAttention(heads, 8, qkv_format="bshd", name="attend", **settings)
    module.set_context_parallel_group(group or world(), ranks, stream, comm)
    return module


def call(module, tokens=4, dtype=torch.float32, **arguments):
    x = seeded(2, tokens, module.num_attention_heads, 8).to(dtype)
    return module(x, x, x, **arguments)


def refusals(rank):
    """Returns the errors of calls that context parallelism does not support."""
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    padding = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    alone = dist.new_group([1])
    return {
        "uneven": message(lambda: call(attention(), 3)),
        "heads": message(lambda: attention("a2a", 3)),
        "type": message(lambda: attention("ring")),
        "list": message(lambda: attention("a2a+p2p")),
        "pair": message(lambda: attention("p2p", group=[world(), world()])),
        "not a group": message(lambda: attention(group="cp")),
        "not a member": message(lambda: attention(group=alone)) if rank == 0 else None,
        "ranks": message(lambda: attention(ranks=[0, 2])),
        "stream": message(lambda: attention(stream=object())),
        "alibi": message(lambda: call(attention(), core_attention_bias_type="alibi")),
        "mask": message(lambda: call(attention(attn_mask_type="padding"), attention_mask=padding)),
        "window": message(
            lambda: call(attention(attn_mask_type="padding_causal", window_size=(2, 0)), **lengths)
        ),
        "columns": message(
            lambda: call(attention(attn_mask_type="arbitrary"), attention_mask=padding)
        ),
        "cache": message(
            lambda: call(
                attention(layer_number=1, num_gqa_groups=4),
                inference_params=te.InferenceParams(2, 8),
            )
        ),
    }


def refusals_of_later_calls(rank):
    """Returns the errors of unsupported calls that follow supported calls of the same sizes.

    Each entry also has the message of the supported call.
    """
    ends, others = (torch.tensor([0, n, 8], dtype=torch.int32) for n in (3, 4))
    mask = torch.zeros(2, 1, 4, 8, dtype=torch.bool)
    bias = seeded(1, 4, 1, 8)
    with_bias = {"core_attention_bias_type": "post_scale_bias"}
    found = {}
    for name, comm, settings, first, later in (
        *[
            (
                f"lengths {comm}",
                comm,
                {"attn_mask_type": "padding_causal"},
                {"cu_seqlens_q": ends, "cu_seqlens_kv": ends.clone()},
                {"cu_seqlens_q": ends, "cu_seqlens_kv": others},
            )
            for comm in ("p2p", "all_gather")
        ],
        *[
            (
                f"mask {comm}",
                comm,
                {"attn_mask_type": "arbitrary"},
                {"attention_mask": mask},
                {"attention_mask": mask.repeat(1, 1, 2, 1)},
            )
            for comm in ("p2p", "all_gather", "a2a")
        ],
        (
            "bias",
            "a2a",
            {},
            with_bias | {"core_attention_bias": bias},
            with_bias | {"core_attention_bias": bias.clone().requires_grad_()},
        ),
    ):
        module = attention(comm, **settings)
        found[name] = [message(partial(call, module, **more)) for more in (first, later)]
    return found


def lengths_that_do_not_fit(rank):
    """Returns the errors of lengths that ranks cannot share, and those of later calls.

    The errors are raised before anything is sent: the group would time out after five seconds.
    """
    group, x, found = dist.new_group([0, 1], timeout=timedelta(seconds=5)), seeded(12, 4, 8), {}
    for comm in ("p2p", "all_gather", "a2a"):
        module = te.DotProductAttention(
            4, 8, qkv_format="thd", attn_mask_type="padding_causal", name="attend"
        )
        module.set_context_parallel_group(group, None, None, comm)
        for name, last in (("uneven", 10), ("too many", 28), ("fits", 24)):
            ends = torch.tensor([0, 8, last], dtype=torch.int32)
            more = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
            found[f"{name} {comm}"] = message(partial(module, x, x, x, **more))
            if name == "fits":
                found[f"none {comm}"] = message(partial(module, x, x, x))
    return found


def in_fp8(rank):
    """Whether FP8 attention with "a2a" equals FP8 attention of whole sequences, bit for bit."""
    alone = [dist.new_group([one]) for one in range(2)][rank]
    found = []
    for shared in (False, True):
        module = te.DotProductAttention(4, 16, qkv_format="bshd")
        group = dist.group.WORLD if shared else alone
        if shared:
            module.set_context_parallel_group(group, None, None, "a2a")
        tensors = []
        for step in range(3):  # the scales of the first step are 1
            whole = [10.0 * seeded(2, 16, 4, 16, seed=4 * step + i) for i in range(3)]
            grad = seeded(2, 16, 64, seed=4 * step + 3)
            if shared:
                *whole, grad = (shard_sequence(x, group, 1) for x in (*whole, grad))
            leaves = [x.requires_grad_() for x in whole]
            recipe = DelayedScaling(fp8_dpa=True, amax_history_len=2)
            with te.fp8_autocast(fp8_recipe=recipe, fp8_group=group):
                out = module(*leaves)
            out.backward(grad)
            tensors += [out.detach(), *[x.grad for x in leaves]]
        if not shared:
            tensors = [shard_sequence(x, dist.group.WORLD, 1) for x in tensors]
        found.append([*tensors, *[state.scale for state in module.scaling.values()]])
    return [torch.equal(x, y) for x, y in zip(*found, strict=True)]


def in_some_fp8(module, rank):
    with te.fp8_autocast(enabled=rank == 1, fp8_recipe=DelayedScaling(fp8_dpa=True)):
        return call(module)


def differing_mask(rank):
    return torch.zeros(2, 4 - 3 * rank, 4, 8, dtype=torch.bool)


def differing_masks(rank):
    module = attention("a2a", attn_mask_type="arbitrary")
    return call(module, attention_mask=differing_mask(rank))


def differing_biases(rank):
    bias = seeded(1, 4, 4, 8).requires_grad_(rank == 0)
    more = {"core_attention_bias": bias, "core_attention_bias_type": "post_scale_bias"}
    return call(attention("a2a"), **more)


def disagreements(rank):
    """Returns the errors of calls that differ between ranks, and of calls that follow."""
    module = attention()
    found = {
        "tokens": message(lambda: call(module, 4 + 4 * rank)),
        "mask": message(lambda: call(module, attn_mask_type=("causal", "no_mask")[rank])),
        "dtype": message(lambda: call(module, dtype=(torch.float32, torch.bfloat16)[rank])),
        "one is uneven": message(lambda: call(module, 4 - rank)),
        "mask shape": message(lambda: differing_masks(rank)),
        "learned bias": message(lambda: differing_biases(rank)),
        "precision": message(lambda: in_some_fp8(attention(), rank)),
        "mask that nobody reads": message(
            lambda: call(attention(), attention_mask=differing_mask(rank), attn_mask_type="causal")
        ),
    }
    with patch.object(Meeting, "hold", autospec=True, side_effect=Meeting.hold) as met:
        for _ in range(3):
            call(module)
    found["met"] = met.call_count
    return found


def alone(rank):
    """Returns the error of a rank that makes a call of a new shape alone, after a timeout."""
    found, group = None, dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 1:
        found = message(lambda: call(attention(group=group), 8))
    dist.barrier()
    return found


def dropping(rank):
    """Compares dropout with its expectation, and its gradients with finite differences.

    Returns for each kind of communication: the errors of the mean over many draws and of one draw,
    and the derivative along a direction, by the backward and by differences.
    """
    found = {}
    for comm in ("p2p", "all_gather", "a2a"):
        module = attention(comm, attention_dropout=0.25)
        x = [seeded(1, 8, 4, 8, seed=seed) for seed in range(3)]
        module.eval()
        exact = module(*x)
        module.train()
        torch.manual_seed(rank)
        mean = sum(module(*x) for _ in range(300)) / 300
        leaves = [t.clone().requires_grad_() for t in x]
        torch.manual_seed(7)
        out = module(*leaves)
        out.pow(2).sum().backward()
        step = [seeded(1, 8, 4, 8, seed=10 + i) for i in range(3)]
        slope = sum((t.grad * s).sum() for t, s in zip(leaves, step, strict=True))
        sides = []
        for sign in (1e-2, -1e-2):
            torch.manual_seed(7)
            moved = [t + sign * s for t, s in zip(x, step, strict=True)]
            sides.append(module(*moved).pow(2).sum())
        difference = (sides[0] - sides[1]) / 2e-2
        for total in (slope, difference):  # the loss is the sum over both ranks
            dist.all_reduce(total)
        found[comm] = (
            relative(mean, exact),
            relative(out.detach(), exact),
            float(slope),
            float(difference),
        )
    return found


def compiled(rank):
    """Dynamo breaks the graph at attention: one graph ends before it, another begins after it."""
    module = attention()
    x = seeded(2, 4, 4, 8)

    def model(x):
        y = x * 2
        return module(y, y, y) + 1

    with torch.no_grad():
        return torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))


SCENARIOS = (
    layers,
    helpers,
    helpers_refuse,
    copies,
    changed_ends,
    refusals,
    refusals_of_later_calls,
    lengths_that_do_not_fit,
    in_fp8,
    disagreements,
    dropping,
    compiled,
    *context_backends.SCENARIOS,
    alone,
)  # last, because the next meeting of rank 0 would fail after `alone`


def scenarios(rank):
    """Returns the result of each scenario, by name."""
    return {run.__name__: run(rank) for run in SCENARIOS}


def everything(rank, cases):
    """Returns the results of the scenarios, and the outcomes of `cases`."""
    return outcomes(rank, cases) | scenarios(rank)
