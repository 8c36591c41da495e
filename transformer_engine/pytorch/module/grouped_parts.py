"""The parts of a `GroupedLinear`: Linears, and their settings and parameters taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.parameters import ParameterSpec
from transformer_engine.pytorch.module.settings import Setting


@joins_chains
class GroupedPart(Linear):
    """A Linear that ranks share without collectives."""

    module_type = "grouped_linear"
    _joins = False

    def _build_chain(self) -> Chain:
        biased = self.use_bias and not self.return_bias
        if self.parallel_mode == "row" and self.ranks.size > 1 and biased:
            raise ValueError(
                "[GroupedLinear] expected bias=False or return_bias=True with parallel_mode='row':"
                f" the sum over {self.ranks.size} ranks would have each bias as often (layer"
                f" {self.name})"
            )
        chain = super()._build_chain()
        chain.most_shapes = 4  # the rows of an expert seldom repeat
        return chain

    def fixed_settings(self) -> tuple[str, ...]:
        """See `HasSettings`."""
        return (*super().fixed_settings(), "return_bias")


GroupedPart.__name__ = "GroupedLinear"  # messages name what users have made


class _OfParts(Setting):
    """A setting that is stored in the parts; all parts have the same value."""

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else getattr(module.parts()[0], self._name)

    def __set__(self, module: Any, value: Any) -> None:
        for part in module.parts() if module.is_built() else ():
            setattr(part, self._name, value)

    def __delete__(self, module: Any) -> None:
        for part in module.parts():
            delattr(part, self._name)


def of_parts() -> Any:
    """A setting of a `GroupedLinear` that its parts have."""
    return _OfParts(None, flag=False)


class ParameterSetsOfParts:
    """The parameter sets of all parts as one, under the names of the `GroupedLinear`'s parameters.

    `weight3` here is `weight` of part 3.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._own = {
            f"{kind}{i}": (part, kind)
            for i, part in enumerate(parts)
            for kind in ("weight", "bias")
        }
        self.init = parts[0]._parameter_set.init

    def spec(self, name: str) -> ParameterSpec | None:
        """See `ParameterSet`."""
        part, kind = self._own.get(name, (None, ""))
        return None if part is None else part._parameter_set.spec(kind)

    def adopt(self, module: nn.Module, name: str, data: torch.Tensor, trained: bool) -> None:
        """See `ParameterSet`."""
        part, kind = self._own[name]
        part._parameter_set.adopt(part, kind, data, trained)
        module._parameters[name] = part._parameters[kind]
