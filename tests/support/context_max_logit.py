"""Compares `return_max_logit` of ranks that share sequences with that of one rank."""

from datetime import timedelta
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from context_cases import HEADS, SIZE, Case, module_of, outcomes, problem_of
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.distributed import shard_sequence

DRAWS = 4  # a wrong mask is found unless it hides no maximum of any head in all of them
COMMS = ("p2p", "all_gather", "a2a")


def everywhere(x):
    """Returns the tensors of all ranks."""
    stack = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(stack, x.contiguous())
    return stack


class Pair:
    """A module on ranks that share sequences, and the same on one rank with whole sequences."""

    def __init__(self, case, group):
        self.case, self.group = case, group
        self.problem = problem_of(case, dist.get_world_size())
        self.shared, self.single, self.without = (module_of(case) for _ in range(3))
        for module in (self.shared, self.single):
            module.return_max_logit = True
        for module in (self.shared, self.without):
            module.set_context_parallel_group(group, None, None, case.comm)
        self.arguments = self.arguments_with(lambda x, dim: x)
        self.own_arguments = self.arguments_with(lambda x, dim: shard_sequence(x, group, dim))

    def arguments_with(self, cut):
        """Returns arguments of a call, whose masks and bias `cut(tensor, dimension)` returns."""
        rows = {name: cut(x, 2) for name, x in self.problem.rows.items()}
        if self.problem.masks:
            rows["attention_mask"] = tuple(cut(x, 3) for x in self.problem.masks)
        return {**self.problem.arguments, **rows}

    def inputs(self, seed):
        """Returns query, key and value of whole sequences."""
        generator = torch.Generator().manual_seed(seed)
        found = [torch.randn(x.shape, generator=generator) for x in self.problem.inputs]
        return [x.to(here(), self.case.dtype) for x in found]

    def cut(self, x):
        dim = {"sbhd": 0, "bshd": 1, "thd": 0}[self.case.format]
        return shard_sequence(x, self.group, dim, cu_seqlens=self.problem.starts)


def draws(case, group):
    """Returns for each draw of inputs: the results of one rank, of this rank, and of all ranks.

    The last entry of each draw says whether attention gives the same bits without these results.
    """
    pair, found = Pair(case, group), []
    for seed in range(DRAWS):
        whole = pair.inputs(seed)
        expected = pair.single(*whole, **pair.arguments)[1]
        own = [pair.cut(x).clone().requires_grad_() for x in whole]
        out, logits = pair.shared(*own, **pair.own_arguments)
        out.sum().backward()
        assert own[0].grad is not None and not logits.requires_grad
        same = torch.equal(out, pair.without(*own, **pair.own_arguments))
        found.append((expected, logits, everywhere(logits), same))
    return found


def max_logits(rank, cases):
    """Returns `draws` of each case, or the text of the exception that it raised."""
    return outcomes(rank, cases, draws)


def in_fp8(rank):
    """Returns pairs of results in FP8 attention, of one rank and of ranks that share sequences.

    The second step of each module runs with scales that delayed scaling has computed.
    """
    recipe, found = DelayedScaling(fp8_dpa=True, amax_history_len=2), []
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    for comm in COMMS:
        pair = Pair(Case(comm), dist.group.WORLD)
        for step in range(2):
            whole = [10.0 * x for x in pair.inputs(step)]
            with te.fp8_autocast(fp8_recipe=recipe, fp8_group=alone):
                expected = pair.single(*whole)[1]
            with te.fp8_autocast(fp8_recipe=recipe):
                found.append((expected, pair.shared(*[pair.cut(x) for x in whole])[1]))
    return found


def attention(comm, group=None, returns=True, **settings):
    settings = {"qkv_format": "bshd", "attn_mask_type": "causal", "name": "attend", **settings}
    module = te.DotProductAttention(HEADS, SIZE, return_max_logit=returns, **settings)
    module.set_context_parallel_group(group or dist.group.WORLD, None, None, comm)
    return module


def tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, HEADS, SIZE, generator=generator).to(here()) for _ in range(3)]


def blind_heads(rank):
    """Returns the results if a mask hides all keys from the second head, and of no sequences."""
    hidden = torch.zeros(1, HEADS, 4, 8, dtype=torch.bool, device=here())
    hidden[:, 1] = True
    ends, found = torch.zeros(1, dtype=torch.int32, device=here()), []
    for comm in COMMS:
        masked = attention(comm, attn_mask_type="arbitrary")
        packed = attention(comm, attn_mask_type="padding_causal", qkv_format="thd")
        found.append(
            (
                masked(*tensors(rank), attention_mask=hidden)[1],
                packed(*[x[0] for x in tensors(rank)], cu_seqlens_q=ends, cu_seqlens_kv=ends)[1],
            )
        )
    return found


def not_a_number(rank):
    """Returns the results if the first rank has a NaN in the first head, the second in the third.

    A maximum of two numbers that drops the NaN of either rank is found.
    """
    found = []
    for comm in COMMS:
        query, key, value = tensors(rank)
        query[0, 0, 2 * rank, 0] = float("nan")
        found.append(attention(comm)(query, key, value)[1])
    return found


def disagreements(rank):
    """Returns the errors if one rank alone asks for the scores, and whether a later call works.

    The group would time out after five seconds.
    """
    group, found = dist.new_group([0, 1], timeout=timedelta(seconds=5)), []
    for comm in COMMS:
        try:
            attention(comm, group, returns=rank == 0)(*tensors(rank))
        except RuntimeError as error:
            found.append((str(error), len(attention(comm, group)(*tensors(rank))) == 2))
    return found


def listing(operators, graph, inputs):
    """A backend of torch.compile that appends the names of all operators to a list."""
    operators += [str(node.target) for node in graph.graph.nodes]
    return graph


def compiled(rank):
    """Whether compiled code returns what eager code returns, with and without gradients.

    Also whether it has graphs, none of which sends anything: attention leaves them.
    """
    found, ends = [], torch.tensor([0, 5, 13], dtype=torch.int32, device=here())
    starts = torch.tensor([0, 8, 24], dtype=torch.int32, device=here())
    packed = {"attn_mask_type": "padding_causal", "qkv_format": "thd"}
    of_packed = {f"cu_seqlens_{x}": ends for x in ("q", "kv")}
    of_packed |= {f"cu_seqlens_{x}_padded": starts for x in ("q", "kv")}
    for comm, (settings, more) in product(COMMS, (({}, {}), (packed, of_packed))):
        module, own = attention(comm, **settings), tensors(rank)
        if more:
            own = [torch.cat([x, x[:1]]).flatten(0, 1) for x in own]

        def model(x, y, z, module=module, more=more):
            out, logits = module(x * 2, y, z, **more)
            return out + 1, logits + 1

        torch.compiler.reset()  # Dynamo recompiles a function only a few times
        operators = []
        of_graphs = torch.compile(model, backend=partial(listing, operators))
        for leaves in (own, [x.clone().requires_grad_() for x in own]):
            pairs = zip(of_graphs(*leaves), model(*leaves), strict=True)
            found += [torch.equal(*pair) for pair in pairs]
        with torch.no_grad():
            found.append(torch.equal(of_graphs(*own)[1], model(*own)[1]))
        found.append(bool(operators) and not any("c10d" in name for name in operators))
    return found


def of_tensor_parallel_ranks(rank):
    """Returns pairs of results of two by two ranks: of all heads on one rank, and of own heads."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor, context = groups[rank // 2], groups[2 + rank % 2]
    whole, found = [torch.cat((x, y), 1) for x, y in zip(tensors(0), tensors(1), strict=True)], []
    for comm, bias in (("p2p", "no_bias"), ("all_gather", "no_bias"), ("a2a", "alibi")):
        build = partial(te.DotProductAttention, HEADS, SIZE, qkv_format="bshd")
        build = partial(build, return_max_logit=True)
        expected = build()(*whole, core_attention_bias_type=bias)[1]
        module = build(tp_size=2, tp_group=tensor, cp_group=context, cp_comm_type=comm)
        own = [shard_sequence(x, context, 1).chunk(2, 2)[rank % 2] for x in whole]
        found.append((expected, module(*own, core_attention_bias_type=bias)[1]))
    return found


def two_ranks(rank, cases):
    """Returns `max_logits` of the cases, and the results of the scenarios of two ranks."""
    scenarios = (in_fp8, blind_heads, not_a_number, disagreements, compiled)
    return max_logits(rank, cases) | {one.__name__: one(rank) for one in scenarios}


def four_ranks(rank, cases):
    """Returns `max_logits` of the cases, and the results of tensor parallel ranks."""
    found = {"of_tensor_parallel_ranks": of_tensor_parallel_ranks(rank)}
    return max_logits(rank, cases) | found
