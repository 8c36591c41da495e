"""Operators of compiled code: one for the forward of a chain or a layer, one for its backward.

Dynamo sees `te::chain`. AOTAutograd looks inside and finds the autograd function below, which calls
`te::chain_forward` and `te::chain_backward`. These run segments, recorded as in eager mode. A key,
which is a hash of the description of all parts, names their `ChainOperator`.

Calls are traced stage by stage if sizes are symbols, if the input is so large that the host's time
does not matter (parts free memory earlier), and in checkpoints, whose policies name operators.
Programs that are exported for inference are traced stage by stage, too: the process that loads
such a program does not know these keys.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

import transformer_engine
from transformer_engine.pytorch._torch_private import compiling, constant_in_graphs
from transformer_engine.pytorch.chain.chain_operator import ChainOperator, PartFacts, PlacedPart
from transformer_engine.pytorch.kernels.library import composite_op, library_op


class _Operators(dict[str, ChainOperator]):
    def __missing__(self, key: str) -> NoReturn:
        raise RuntimeError(
            "[torch.compile] expected a graph that this process has compiled, got one with an"
            f" operator of another process ({key}): compile the model here, or save a program that"
            " torch.export has made under torch.no_grad()"
        )


# By key. A key is a hash of the parts, so an operator is never replaced.
_OPERATORS = _Operators()


@functools.cache
def _hash_of_sources() -> str:
    """A hash of this package's sources, which tells commits apart that have the same version."""
    digest = hashlib.sha256(transformer_engine.__version__.encode())
    for path in sorted(Path(transformer_engine.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@constant_in_graphs
def operator_key(values: int, parts: Sequence[Any], outputs: Sequence[int]) -> str:
    """The key of a `ChainOperator`. Dynamo calls this and takes the result as a constant.

    Args:
        values: see `ChainOperator`.
        parts: for each part a tuple with the elements of its `PlacedPart`; facts are a tuple, too.
        outputs: see `ChainOperator`.
    """
    # A graph from a cache on disk must not find an operator that saves other tensors.
    text = repr((_hash_of_sources(), values, parts, outputs))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    if key not in _OPERATORS:
        placed = [PlacedPart(PartFacts(*facts), *others) for facts, *others in parts]
        _OPERATORS[key] = ChainOperator(values, placed, outputs)
    return key


@library_op()
def chain_forward(
    key: str,
    inputs: list[torch.Tensor | None],
    state: list[torch.Tensor],
    *,
    launch: bool = True,
) -> list[torch.Tensor]:
    """The forward of a chain; amaxes in `state` are raised (docs/adr/0003).

    Args:
        key: key of the operator.
        inputs: the values that come in, and the parameters.
        state: the memory of scaling state, see `ChainOperator.bound`.
        launch: False returns tensors of the right shapes without computing anything.

    Returns:
        Results and saved tensors. None of them is an input, and no two share memory.
    """
    operator = _OPERATORS[key]
    if launch:
        return operator.forward(inputs, state)
    with compiling():
        return operator.shapes_of_forward(inputs, state)


@library_op()
def chain_backward(
    key: str,
    sizes: list[int],
    grads: list[torch.Tensor | None],
    saved: list[torch.Tensor | None],
    state: list[torch.Tensor],
    *,
    launch: bool = True,
) -> list[torch.Tensor]:
    """The backward of a chain; amaxes in `state` are raised.

    Args:
        key: as in the forward.
        sizes: the sizes of all values that came in, in one list.
        grads: gradients of the results, contiguous.
        saved: the inputs and the results of `chain_forward`; None for those that the backward does
            not read.
        state: as in the forward.
        launch: False returns tensors of the right shapes without computing anything.

    Returns:
        Gradients, see `ChainOperator.backward`.
    """
    with nullcontext() if launch else compiling():
        return _OPERATORS[key].backward(sizes, grads, saved, state, launch)


class _CompiledNode(torch.autograd.Function):
    """The two operators as one node of the graph that AOTAutograd traces."""

    @staticmethod
    def forward(ctx: Any, key: str, state: Sequence[torch.Tensor], *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        operator = _OPERATORS[key]
        made = torch.ops.te.chain_forward(key, inputs, state)
        ctx.call = key, state, operator.sizes(inputs)
        known = zip((*inputs, *made), operator.reads, strict=True)
        ctx.save_for_backward(*[x if read else None for x, read in known])
        return tuple(_results(operator, inputs, made))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        key, state, sizes = ctx.call
        contiguous = [None if g is None else g.contiguous() for g in grads]
        saved = [*ctx.saved_tensors]
        found = iter(torch.ops.te.chain_backward(key, sizes, contiguous, saved, state))
        needs = _OPERATORS[key].needs
        made = [next(found) if need else None for need in needs]
        return (None, None, *[g if g is None or g.shape != (0,) else None for g in made])


def _results(operator: ChainOperator, inputs: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    known = [*inputs, *made]
    return [known[number] for number in operator.results]


@composite_op("chain(str key, Tensor?[] inputs, Tensor[] state) -> Tensor[]")
def chain(key: str, inputs: list[Any], state: list[torch.Tensor]) -> list[torch.Tensor]:
    """The operator that compiled code calls; see the top of this file."""
    operator = _OPERATORS[key]
    if operator.staged(inputs):
        with nullcontext() if type(inputs[0]) is torch.Tensor else compiling():
            made = operator.run_staged(inputs, state)
        return [*made] if isinstance(made, tuple) else [made]
    if any(operator.needs):
        return [*_CompiledNode.apply(key, state, *inputs)]
    return _results(operator, inputs, torch.ops.te.chain_forward(key, inputs, state))
