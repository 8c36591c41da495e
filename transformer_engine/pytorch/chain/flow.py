"""The `data_flow` of a layer, and the classes that run it or list its parts.

A layer defines in `data_flow` what it computes, once: it calls modules and runs parts. With `EAGER`
these run one after the other, as in any PyTorch code. `ListingFlow`s collect the chains of all
parts, which then run as one; `run_layer.py` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch import _torch_private
from transformer_engine.pytorch.chain.part import AddingPart
from transformer_engine.pytorch.chain.plan import EmptyInCopies
from transformer_engine.pytorch.parallel.construction import Remakable

Arguments = Sequence[dict[str, Any]]
_FORWARDS: dict[type, Any] = {}  # `forward` of each class that `joins_chains`


def joins_chains(module: type[nn.Module]) -> type[nn.Module]:
    """Let modules of this class run in a larger chain without being called; not of subclasses."""
    _FORWARDS[module] = module.forward
    return module


class FusedLayers(EmptyInCopies, dict[Hashable, Any]):
    """The chains of one layer that run as one, by what its `data_flow` depends on."""


class FlowModule(Remakable, nn.Module):
    """Base of layers that define their computation in `data_flow`.

    Attributes:
        data_flow: `data_flow(flow, values, *groups)` computes the results of the layer from the
            values that come in and groups of arguments.
        flow_key: `flow_key()` returns what `data_flow` depends on beside its arguments.
        flow_of_call: adds the parts of a call to a larger flow; for classes with `joins_chains`.
    """

    data_flow: Callable[..., Any]
    flow_key: Callable[[], Hashable]
    flow_of_call: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self._fused = FusedLayers()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor parallel group; see `Linear.set_tensor_parallel_group`."""
        child: Any
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)


class Flow:
    """Runs the modules and parts of a `data_flow` one after the other."""

    def call(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a module with values and further arguments."""
        return module(*arguments, **keywords)

    def adds(self, module: Any, residual: Any) -> bool:
        """Whether `call_adding` of this module is possible: nobody observes what it returns."""
        if type(module) not in _FORWARDS or is_observed(module):
            return False
        if not torch.compiler.is_compiling() and _torch_private.has_global_module_hooks():
            return False
        return _can_add(module, residual)

    def call_adding(self, module: Any, residual: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a module whose last GEMM also adds a residual, see `module.residual`."""
        if isinstance(module, FlowModule):
            return module.forward(*arguments, adds=True, **keywords)
        second = _second_value(module, residual, arguments[0])
        return module.call_adding(second, *arguments, **keywords)

    def run(self, part: Any, *arguments: Any) -> Any:
        """Run a `Part` with values and further arguments."""
        return part(*arguments)

    def admit(self, condition: Callable[[str], bool]) -> None:
        """Check a condition of a later part now, before the parts in front of it are traced.

        A flow that gathers the parts of one operator gives up if the condition is False, and the
        layer runs part by part. Other flows ignore the condition.

        Args:
            condition: takes the type of the device, such as `"cuda"`.
        """


EAGER = Flow()


class NotOneChain(Exception):
    """The layer cannot be one chain: one of its modules must be called."""


class ListingFlow(Flow):
    """Lists the parts of a `data_flow` without running them. Numbers stand for the values.

    Args:
        values: number of values that come into the layer; they are numbered from 0.

    Attributes:
        modules: the modules that the `data_flow` calls.
    """

    def __init__(self, values: int) -> None:
        self.modules: list[nn.Module] = []
        self._likes = {i: i for i in range(values)}

    def call(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        """Add the chain of a module, or the parts that a layer runs."""
        self._note(module)
        if isinstance(module, FlowModule):
            return module.flow_of_call(self, *arguments, **keywords)
        return self._add(module, arguments, keywords)

    def adds(self, module: Any, residual: Any) -> bool:
        """See `Flow.adds`. The flow is used only if nobody observes any of its modules."""
        return type(module) not in _FORWARDS or _can_add(module, residual)

    def call_adding(self, module: Any, residual: Any, *arguments: Any, **keywords: Any) -> Any:
        """See `Flow.call_adding`."""
        self._note(module)
        if isinstance(module, FlowModule):
            return module.flow_of_call(self, *arguments, adds=True, **keywords)
        second = _second_value(module, residual, arguments[0])
        values = arguments[:1] if second is None else (arguments[0], second)
        return self._add(AddingPart(module), (*values, *arguments[1:]), keywords)

    def _note(self, module: Any) -> None:
        """Note a module of the layer; raise `NotOneChain` if it must be called."""
        if type(module) not in _FORWARDS:
            raise NotOneChain
        self.modules.append(module)
        # A guard of compiled code checks this in every call; `getattr` would need one in Python,
        # because the attribute may be absent.
        if module.__dict__.get("return_bias"):
            raise NotOneChain

    def run(self, part: Any, *arguments: Any) -> Any:
        """Add the chain of a part."""
        return self._add(part, arguments, {})

    def _add(self, part: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        count = part.chain.inputs
        inputs = arguments[:count]
        if None in inputs:  # perhaps an error, which the part raises when it is called
            raise NotOneChain
        if keywords and not getattr(part, "not_in_chains", frozenset()).isdisjoint(keywords):
            raise NotOneChain
        likes = tuple([self._likes[v] for v in inputs])
        outputs = self.add(part, inputs, likes, arguments[count:], keywords)
        self._likes.update({v: likes[min(i, count - 1)] for i, v in enumerate(outputs)})
        return outputs[0] if len(outputs) == 1 else outputs

    def add(
        self,
        part: Any,
        inputs: tuple[int, ...],
        likes: tuple[int, ...],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> tuple[int, ...]:
        """Add a part, and return the numbers of its results.

        Args:
            part: a part or module, with `chain` and `plan_call`.
            inputs: numbers of the values that the part reads.
            likes: for each of them, the value that comes into the layer and holds the same tokens,
                those of all ranks or of this rank.
            arguments: further positional arguments.
            keywords: keyword arguments.
        """
        raise NotImplementedError


def is_observed(module: Any) -> bool:
    """Whether hooks observe a module, or its `forward` was replaced."""
    return (
        _FORWARDS.get(type(module)) is not type(module).forward
        or "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
    )


def _can_add(module: Any, residual: Any) -> bool:
    """Whether the last GEMM of a module can add this residual; see `module.residual` for None."""
    if isinstance(module, FlowModule):
        return True
    adding = module.chain.adding
    if adding is None or module.return_bias:
        return False
    return residual is None or adding.inputs > 1


def _second_value(module: Any, residual: Any, first: Any) -> Any:
    """What `chain.adding` of a module reads beside the first argument; None for nothing."""
    if module.chain.adding.inputs == 1:
        return None
    return first if residual is None else residual
