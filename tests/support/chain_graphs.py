"""Finds the operators of chains in the graphs that Dynamo makes of layers."""

from typing import Any

import torch


class ChainGraphs:
    """A Dynamo backend that records the operators of each graph, and compiles with aot_eager.

    Attributes:
        keys: for each graph, the keys of the chain operators in it.
        others: number of other operators of this package in the last graph.
    """

    def __init__(self) -> None:
        self.keys: list[list[str]] = []
        self.others = 0

    @property
    def chains(self) -> int:
        """Number of chain operators in the last graph."""
        return len(self.keys[-1]) if self.keys else 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        chains = [n for n in nodes if n.target is torch.ops.te.chain]
        self.keys.append([n.args[0] for n in chains])
        self.others = sum("te." in str(n.target) for n in nodes) - len(chains)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
