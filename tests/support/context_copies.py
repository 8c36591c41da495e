"""What two context-parallel ranks keep beyond a call: copies of modules, lengths for a backward."""

import copy

import torch
import torch.distributed as dist
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import gather_sequence, shard_sequence


def copies(rank):
    """Returns whether copies of a layer share its groups and give the same results."""
    found = []
    for comm in ("p2p", "a2a"):
        layer = te.TransformerLayer(16, 16, 2, attn_input_format="bshd", device=here()).eval()
        layer.set_context_parallel_group(dist.group.WORLD, [0, 1], None, comm)
        angles = te.RotaryPositionEmbedding(8).to(here())(8)
        x = torch.randn(2, 4, 16, device=here())
        before = layer(x, rotary_pos_emb=angles)
        copied = copy.deepcopy(layer)
        core, own = copied.self_attention.core_attention, layer.self_attention.core_attention
        same = core.cp_group is own.cp_group and core.context is own.context
        found.append((same, torch.equal(copied(x, rotary_pos_emb=angles), before)))
    return found


def changed_ends(rank):
    """Returns the error of a backward whose lengths the next batch has replaced."""
    ends = torch.tensor([0, 4, 12], dtype=torch.int32)
    x = shard_sequence(torch.arange(12.0), dist.group.WORLD, cu_seqlens=ends).requires_grad_()
    whole = gather_sequence(x, dist.group.WORLD, cu_seqlens=ends)
    ends.copy_(torch.tensor([0, 8, 12]))
    try:
        whole.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"
