"""Graphs that Dynamo makes of layers, and the operators of chains in them."""

from typing import Any

import torch


class ChainGraphs:
    """A backend that looks at the graphs that it gets.

    Attributes:
        keys: for each graph, the keys of the operators of its chains.
        others: how many other operators of this package the last one has.
    """

    def __init__(self) -> None:
        self.keys: list[list[str]] = []
        self.others = 0

    @property
    def chains(self) -> int:
        """Operators of chains in the last graph."""
        return len(self.keys[-1]) if self.keys else 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        chains = [n for n in nodes if n.target is torch.ops.te.chain]
        self.keys.append([n.args[0] for n in chains])
        self.others = sum("te." in str(n.target) for n in nodes) - len(chains)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
