"""Compares fused layers on several ranks with the same layers run module by module."""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attempts import attempt
from fused_layers import KINDS, is_fused, make_of, moved, results
from precisions import RECIPES
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.chain import run_layer

TOKENS = 128  # over all ranks
# Arguments of calls. They describe whole sequences, of which each rank holds a part.
CALLS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, 0)},
    "mask": {
        "self_attn_mask_type": "arbitrary",
        "attention_mask": torch.ones(TOKENS, TOKENS).triu(2).bool()[None, None],
    },
    "lengths": {
        "self_attn_mask_type": "padding_causal",
        "cu_seqlens_q": torch.tensor([0, 100, 228], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 100, 228], dtype=torch.int32),
    },
    "recomputed": {"checkpoint_core_attention": True},
    "slopes": {"core_attention_bias_type": "alibi"},
    "rotation": {"rotary_pos_emb": te.RotaryPositionEmbedding(16)(TOKENS)},
    "microbatch": {"is_first_microbatch": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    # The diagonal of this mask depends on the numbers of queries and keys.
    "aligned at the end": {"enc_dec_attn_mask_type": "causal_bottom_right"},
    "sums": {"fuse_wgrad_accumulation": True, "fuse_qkv_params": True},
    "overlap": {"ub_tp_comm_overlap": True, "ub_bulk_wgrad": False},
}


def cases(most: bool = False) -> list[tuple[str, str, bool, str, str]]:
    """Returns layer, recipe, sequence parallelism, arguments of the call and of the layer."""
    found = [("encoder", recipe, on, "", "") for recipe in RECIPES for on in (False, True)]
    recipes = [*RECIPES]
    for i, kind in enumerate(kind for kind in KINDS if kind != "encoder"):
        ways = (False, True) if most else (bool((i + i // 4) % 2),)
        found += [(kind, recipes[(i + on) % 4], on, "", "") for on in ways]
    found += [("encoder", recipes[i % 2], True, name, "") for i, name in enumerate(CALLS)]
    found += [("encoder", "delayed", True, "", name) for name in ("sums", "overlap")]
    return [*found, ("decoder", "delayed", True, "", "aligned at the end")]


def _batch(sequence: bool, tokens: int, device: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 2, 64, generator=generator).to(device, torch.bfloat16)
    if sequence:
        x = x.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return x.requires_grad_()


def _one_way(kind: str, recipe: str, sequence: bool, call: str, option: str) -> Any:
    more = {"tp_group": dist.group.WORLD, "set_parallel_mode": True, **OPTIONS.get(option, {})}
    more |= {"sequence_parallel": sequence}
    more["qkv_format" if "attention" in kind else "attn_input_format"] = "sbhd"
    layer = make_of(kind, here(), **more)
    if option == "sums":
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
    keywords = moved(CALLS.get(call, {}), here())
    if "decoder" in kind:
        keywords["encoder_output"] = _batch(sequence, 3 * TOKENS, here(), 5).detach()
    make = partial(_batch, sequence, TOKENS)
    found, counts, y = results(layer, recipe, here(), make_batch=make, **keywords)
    sums = [p.main_grad for p in layer.parameters() if hasattr(p, "main_grad")]
    return [*found, *sums], counts, y


def _equal(a: torch.Tensor | None, b: torch.Tensor | None, kind: str) -> bool:
    if a is None or b is None:
        return a is b
    if kind == "sink" and a.is_cuda and a.dim() == 1:  # cuDNN sums its gradient in any order
        return torch.allclose(a, b, rtol=1e-2)
    return torch.equal(a, b)


def _both_ways(*case: Any) -> str:
    """Returns the results that differ between fused and unfused runs, "" if all are equal."""
    fused, counts, y = _one_way(*case)
    assert is_fused(y), "one node"
    before = run_layer._may_fuse
    run_layer._may_fuse = lambda x: False
    try:
        parts, expected, y = _one_way(*case)
    finally:
        run_layer._may_fuse = before
    assert not is_fused(y), "one node for each part"
    assert counts == expected
    pairs = zip(fused, parts, strict=True)
    unequal = [i for i, (a, b) in enumerate(pairs) if not _equal(a, b, case[0])]
    return f"results {unequal} differ" if unequal else ""


def both_ways(rank: int) -> dict[Any, str]:
    """Returns for each case an error message, "" if it passed."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # a fixed order of gradient sums
    te.initialize_ub([TOKENS * 2, 64], dist.get_world_size())
    found = {case: attempt(_both_ways, *case) for case in cases(most=here().type == "cuda")}
    te.destroy_ub()
    return found
