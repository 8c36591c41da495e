"""Compares context-parallel attention in FP8 with its definition, and with that of one process."""

import os
from unittest.mock import patch

import fp8_attention_definition as definition
import torch
import torch.distributed as dist
from context_cases import BATCH, HEADS, SIZE, TOKENS, Case, module_of, outcomes, problem_of, run
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention.context import gather
from transformer_engine.pytorch.attention.core import casts
from transformer_engine.pytorch.distributed import shard_sequence
from transformer_engine.pytorch.fp8.scaling_state import BACKWARD, FORWARD
from transformer_engine.pytorch.parallel import exchange

RECIPE = DelayedScaling(fp8_dpa=True, amax_history_len=4)
COLUMNS = {
    "qkv": (FORWARD, casts._QKV),
    "softmax": (FORWARD, casts._SOFTMAX),
    "out": (FORWARD, casts._OUT),
    "grad_out": (BACKWARD, casts._GRAD_OUT),
    "grad_product": (BACKWARD, casts._GRAD_PRODUCT),
    "grad_qkv": (BACKWARD, casts._GRAD_QKV),
}
STEPS = 2  # the scales of the first step are 1


def in_fp8(module, group=None, **settings):
    """Returns a function that calls the module in an autocast."""

    def call(*inputs, **arguments):
        with te.fp8_autocast(fp8_recipe=RECIPE, fp8_group=group, **settings):
            return module(*inputs, **arguments)

    call.softmax_offset = getattr(module, "softmax_offset", None)
    return call


def read(module, name, row=None):
    """Returns the scale of a kind of cast (1 before the first step), or an amax of its history."""
    direction, column = COLUMNS[name]
    state = module.scaling.get(direction)
    if state is None:
        return 1.0
    return float(state.scale[column] if row is None else state.amax_history[row, column])


class Whole:
    """The whole sequences of a case, and the definition of FP8 attention on them."""

    def __init__(self, case):
        self.case, size = case, dist.get_world_size()
        problem = problem_of(case, size)
        self.arguments, self.starts = problem.arguments, problem.starts
        self.shapes = [x.shape for x in problem.inputs]
        self.parts = {"all_gather": 1, "p2p": size, "a2a+p2p": size // 2}[case.comm]

    def sequences(self):
        """Returns for each sequence an index that selects its tokens, and its length with padding.

        Indexing gives `[tokens, heads, size]`.
        """
        if self.case.format != "thd":
            index = (lambda i: (slice(None), i)) if self.case.format == "sbhd" else lambda i: (i,)
            return [(index(i), TOKENS) for i in range(BATCH)]
        lengths = self.arguments["cu_seqlens_q"].diff()
        starts, ends = self.starts[:-1], self.starts[1:]
        return [
            ((slice(int(start), int(start + length)),), int(end - start))
            for start, end, length in zip(starts, ends, lengths, strict=True)
        ]

    def step(self, number):
        """Returns query, key, value and the gradient of the result; padding is zero."""
        generator = torch.Generator().manual_seed(number)
        found = []
        for shape in (*self.shapes, self.shapes[0]):
            x = torch.zeros(shape)
            for place, _ in self.sequences():
                x[place] = torch.randn(x[place].shape, generator=generator)
            found.append(x.to(here(), self.case.dtype))
        return found[:3], found[3]

    def owners(self, tokens, length):
        """Returns for each key the number of its part: the rank of the ring that holds the key."""
        chunks = torch.arange(tokens) * 2 * self.parts // length
        return torch.minimum(chunks, 2 * self.parts - 1 - chunks).to(here())

    def defined(self, inputs, grad, sink, found_casts):
        """Returns result and gradients by the definition."""
        found = [torch.zeros_like(x) for x in (grad, *inputs)]
        sink_grad = []
        for place, length in self.sequences():
            *own, own_grad = (x[place].float().transpose(0, 1) for x in (*inputs, grad))
            tokens = own_grad.shape[1]
            hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=grad.device).triu(1)
            hidden = hidden if "causal" in self.case.mask else torch.zeros_like(hidden)
            owners = self.owners(tokens, length)
            results = definition.attention(own, own_grad, hidden, owners, sink, found_casts)
            for x, result in zip(found, results, strict=False):
                x[place] = result.transpose(0, 1).to(x.dtype)
            sink_grad += results[4:]
        return [found[0].flatten(-2), *found[1:], *([sum(sink_grad)] if sink_grad else [])]


def share_off(x, y):
    """Returns the share of elements that differ by more than a thousandth of the RMS of `y`."""
    x, y = x.float(), y.float()
    return float(((x - y).abs() > 1e-3 * y.pow(2).mean().sqrt()).float().mean())


def relative(x, y):
    return float((x.double() - y.double()).norm() / y.double().norm())


class Comparison:
    """Runs attention on the ranks, in this process alone, and in this process in high precision."""

    def __init__(self, case, group):
        self.case, self.group, self.whole = case, group, Whole(case)
        self.shared, self.single, self.exact = (module_of(case) for _ in range(3))
        self.shared.set_context_parallel_group(group, None, None, case.comm)
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.alone = groups[dist.get_rank()]

    def cut(self, x):
        dim = {"sbhd": 0, "bshd": 1, "thd": 0}[self.case.format]
        return (
            x if x.dim() == 1 else shard_sequence(x, self.group, dim, cu_seqlens=self.whole.starts)
        )

    def run(self, module, call, inputs, grad):
        module.zero_grad()
        return run(call, inputs, self.whole.arguments, grad.flatten(-2), self.case)

    def defined(self, inputs, grad, scales, skip=""):
        """Returns results and gradients of this rank's tokens by the definition, and the amaxes."""
        offset = getattr(self.shared, "softmax_offset", None)
        found_casts = definition.Casts(scales, skip)
        sink = None if offset is None else offset.detach().float()
        found = self.whole.defined(inputs, grad, sink, found_casts)
        return [self.cut(x) for x in found], found_casts.amaxes

    def step(self, number):
        """Returns an entry of `compare` for one step."""
        inputs, grad = self.whole.step(number)
        scales = {name: read(self.shared, name) for name in COLUMNS}
        own = [self.cut(x) for x in inputs], self.cut(grad)
        found = self.run(self.shared, in_fp8(self.shared), *own)
        for x in found[4:]:
            dist.all_reduce(x)
        wanted, amaxes = self.defined(inputs, grad, scales)
        without = [self.defined(inputs, grad, scales, skip)[0] for skip in COLUMNS]
        single = self.run(self.single, in_fp8(self.single, self.alone), inputs, grad)
        exact = [self.cut(x) for x in self.run(self.exact, self.exact, inputs, grad)]
        return {
            "off": max(map(share_off, found, wanted)),
            "least": min(max(map(share_off, others, wanted)) for others in without),
            "amaxes": max(abs(read(self.shared, name, -1) / amaxes[name] - 1) for name in COLUMNS),
            "errors": list(map(relative, found, exact)),
            "single": [relative(self.cut(x), y) for x, y in zip(single, exact, strict=True)],
            "scales": [
                (read(self.shared, name), read(self.single, name)) for name in ("qkv", "grad_out")
            ],
        }


def compare(case, group):
    """Returns for each step, with scales that delayed scaling computes from the amaxes:

    off: the largest share of elements of results and gradients that differ from the definition.
    least: the smallest such share between the definition and the definition without one cast.
    amaxes: the largest relative error of an amax.
    errors: the errors of results and gradients against attention in high precision.
    single: the same errors of FP8 attention in one process.
    scales: the scales of query, key and value, and of the gradient of the result, on these ranks
        and in one process.
    """
    comparison = Comparison(case, group)
    return [comparison.step(number) for number in range(STEPS)]


def fp8_outcomes(rank, cases):
    """Returns `compare` of each case, or the text of the exception that it raised."""
    os.environ["NVTE_FUSED_ATTN"] = "0"  # one process rounds like ranks, on a GPU, too
    return outcomes(rank, cases, compare)


def shared_module(comm):
    module = module_of(Case(comm))
    module.set_context_parallel_group(dist.group.WORLD, None, None, comm)
    return module


def leaves_and_grad(rank):
    generator = torch.Generator().manual_seed(rank)
    shape = (BATCH, TOKENS // 2, HEADS, SIZE)
    found = [torch.randn(shape, generator=generator).to(here()) for _ in range(4)]
    return [x.requires_grad_() for x in found[:3]], found[3].flatten(-2)


def sent(rank):
    """Returns elements and bytes of the tensors that a rank sends, by kind of communication."""
    found = {}
    for comm, module, name in (
        ("p2p", exchange, "_exchange"),
        ("all_gather", gather, "all_gather_stack"),
    ):
        leaves, grad = leaves_and_grad(rank)
        attention = in_fp8(shared_module(comm))
        with patch.object(module, name, wraps=getattr(module, name)) as send:
            attention(*leaves).backward(grad)
        tensors = [call.args[0] for call in send.call_args_list]
        flat = [x for one in tensors for x in (one if isinstance(one, list | tuple) else [one])]
        found[comm] = [(x.numel(), x.nbytes) for x in flat]
    return found


def calibrated(rank):
    """Returns the error of a calibrating call against high precision, and the amax that it records.

    The amax is that of query, key and value; the expected amax follows it.
    """
    found = {}
    for comm in ("p2p", "all_gather"):
        module = shared_module(comm)
        leaves, _ = leaves_and_grad(rank)
        with torch.no_grad():
            out = in_fp8(module, enabled=False, calibrating=True)(*leaves)
            error = relative(out, module(*leaves))
        largest = torch.stack([x.detach().abs().max() for x in leaves]).max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        found[comm] = (error, read(module, "qkv", -1), float(largest))
    return found


def recomputed(rank):
    """Whether two steps with a recompute region give the same bits and amaxes as without."""
    found = {}
    for comm in ("p2p", "all_gather"):
        tensors_of_both = []
        for region in (False, True):
            module, tensors = shared_module(comm), []
            for _ in range(2):
                leaves, grad = leaves_and_grad(rank)
                call = in_fp8(
                    (lambda *x, module=module: te.checkpoint(module, *x)) if region else module
                )
                out = call(*leaves)
                out.backward(grad)
                tensors += [out, *[x.grad for x in leaves]]
            tensors_of_both.append(
                [*tensors, *[state.amax_history for state in module.scaling.values()]]
            )
        found[comm] = [torch.equal(x, y) for x, y in zip(*tensors_of_both, strict=True)]
    return found


def own_scales(rank):
    """Returns the errors of ranks whose amaxes are not reduced together, after a calibration."""
    alone = [dist.new_group([one]) for one in range(2)][rank]
    apart = DelayedScaling(fp8_dpa=True, reduce_amax=False)
    found = []
    for module, recipe, group in (
        (shared_module("p2p"), RECIPE, alone),
        (shared_module("all_gather"), apart, None),
    ):
        leaves, _ = leaves_and_grad(rank)
        with te.fp8_autocast(False, fp8_recipe=recipe, fp8_group=group, calibrating=True):
            module(*leaves)
        try:
            with te.fp8_autocast(fp8_recipe=recipe, fp8_group=group):
                module(*leaves)
        except ValueError as error:
            found.append(str(error))
    return found


def forbidden(rank):
    """Returns the errors of calls, with and without casts, if all backends are switched off."""
    found, off = [], {"NVTE_UNFUSED_ATTN": "0", "NVTE_FUSED_ATTN": "0"}
    for comm in ("p2p", "all_gather", "a2a"):
        module = shared_module(comm)
        leaves, _ = leaves_and_grad(rank)
        for scope in ({}, {"enabled": False, "calibrating": True}):
            try:
                with patch.dict(os.environ, off):
                    in_fp8(module, **scope)(*leaves)
            except ValueError as error:
                found.append(str(error))
    return found


def fp8_everything(rank, cases):
    """Returns the results of the scenarios above, and the outcomes of `cases`."""
    scenarios = (sent, calibrated, recomputed, own_scales, forbidden)
    return fp8_outcomes(rank, cases) | {one.__name__: one(rank) for one in scenarios}
