"""Counts the operators of compiled graphs, and the bytes that they save for the backward."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from precisions import scope
from saved_memory import saved_storages
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

Wrap = Callable[..., Any]


def compiled(backend: str = "aot_eager") -> Wrap:
    return partial(torch.compile, backend=backend, fullgraph=True)


def operators(part: str, found: Counter[str]) -> Wrap:
    """Returns a compiler that counts the operators that `part` of the graph calls."""

    def compile(graph: torch.fx.GraphModule, _: Any) -> Wrap:
        for node in graph.graph.nodes:
            found[f"{part} {getattr(node.target, '_opname', '')}"] += node.op == "call_function"
        return make_boxed_func(graph.forward)

    return compile


def saved_and_run(call: Wrap, x: torch.Tensor, recipe: str) -> tuple[int, Counter[str]]:
    """Returns the bytes that a compiled step saves, and the operators of its two graphs."""
    torch._dynamo.reset()
    found: Counter[str] = Counter()
    backend = aot_autograd(
        fw_compiler=operators("forward", found),
        bw_compiler=operators("backward", found),
        partition_fn=min_cut_rematerialization_partition,
    )
    graph = torch.compile(call, backend=backend, fullgraph=True)
    with scope(recipe), saved_storages(parameters=False) as seen:
        y = graph(x)
    y.sum().backward()
    return sum(seen.values()), found
