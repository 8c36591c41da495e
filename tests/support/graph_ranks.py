"""Compares tensor-parallel layers in CUDA graphs with eager mode, on the ranks of a test."""

import gc
import warnings
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from rank_device import here
from tensor_parallel_ranks import RECIPES, scope

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cuda_graphs import callables

PRECISIONS = ("bf16", "delayed", "current", "block")
TOKENS, BATCH, HIDDEN, STEPS = 128, 2, 64, 4
CASES = [*product(PRECISIONS, (False, True))]


def _layer(sequence: bool) -> te.TransformerLayer:
    torch.manual_seed(11)
    return te.TransformerLayer(
        HIDDEN,
        128,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        set_parallel_mode=True,
        sequence_parallel=sequence,
        fuse_qkv_params=True,
        tp_group=dist.group.WORLD,
        params_dtype=torch.bfloat16,
        device=here(),
    )


def _input(step: int, sequence: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).to(here(), torch.bfloat16)
    return (x.chunk(2)[dist.get_rank()] if sequence else x).clone().requires_grad_()


def _train(layer: Any, run: Any, precision: str, sequence: bool) -> list[torch.Tensor]:
    """Returns outputs and input gradients of some steps of gradient descent."""
    found = []
    for step in range(STEPS):
        x = _input(step, sequence)
        with scope(precision):
            y = run(x)
        y.float().square().mean().backward()
        found += [y.detach().clone(), x.grad]
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.sub_(parameter.grad)
        layer.zero_grad()
    return found


def _graphed(layer: Any, precision: str, sequence: bool) -> Any:
    more: dict[str, Any] = {}
    if precision in RECIPES:
        more = {"enabled": True, "recipe": RECIPES[precision]}
        more["amax_reduction_group"] = dist.group.WORLD
    callables._check_capturable([layer], None)  # also checked on CPUs, where nothing is captured
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA graphs need samples on a CUDA device")
        return te.make_graphed_callables(layer, (_input(0, sequence),), **more)


def graphs(rank: int) -> dict[tuple[str, bool], bool]:
    """Whether graphs give the bits of eager mode, for each case. On CPUs nothing is captured."""
    found = {}
    for precision, sequence in CASES:
        plain, layer = _layer(sequence), _layer(sequence)
        run = _graphed(layer, precision, sequence)
        one = _train(plain, plain, precision, sequence)
        other = _train(layer, run, precision, sequence)
        found[precision, sequence] = all(
            [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
        )
    del layer, run
    gc.collect()  # `destroy_process_group` waits for graphs with collectives of the group
    return found
