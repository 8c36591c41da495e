"""Parts of one tensor, to which a function is applied in one call."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from transformer_engine.pytorch._torch_private import memory_of
from transformer_engine.pytorch.kernels.packed import map_parts, packed_layout_of

# Queries, keys and values one after the other, or head by head; or with more heads of queries.
WAYS = [
    lambda x: x.view(5, 3, 3, 4, 8).unbind(-3),
    lambda x: x.view(5, 3, 4, 3, 8).unbind(-2),
    lambda x: x.view(5, 3, 12, 8).split((8, 2, 2), -2),
]


@pytest.mark.parametrize("taken_apart", WAYS)
def test_parts_are_mapped_together(taken_apart):
    calls, x = [], torch.randn(10 + 5 * 3 * 96)[10:]

    def double(t):
        calls.append(t.shape)
        assert t.is_contiguous()
        return (2 * t).double()

    parts = taken_apart(x.view(5, 3, 96))
    made = map_parts(double, parts)
    assert calls == [(5, 3, 96)] and packed_layout_of(*made) is not None
    for got, part in zip(made, parts, strict=True):
        assert torch.equal(got, (2 * part).double())


@pytest.mark.parametrize("taken_apart", WAYS)
def test_fake_tensors_are_mapped_as_real_ones(taken_apart):
    """Compiled code learns the memory of results from fake tensors, so the sizes must be equal."""
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            parts = taken_apart(torch.empty(10 + 5 * 3 * 96)[10:].view(5, 3, 96))
            made = map_parts(torch.neg, parts)
            assert {t.untyped_storage().nbytes() for t in made} == {4 * 5 * 3 * 96}
            assert [t.storage_offset() for t in made] == [t.storage_offset() - 10 for t in parts]
            others = map_parts(torch.neg, (parts[1], parts[0], parts[2].clone()))
            assert len({memory_of(t) for t in others}) == 3


def test_others_one_by_one():
    x = torch.randn(5, 3, 3, 4, 8)
    query, key, value = x.unbind(2)
    for parts in [(key, query, value), (query, key, value.clone()), (query, key.mT, value)]:
        for got, part in zip(map_parts(torch.neg, parts), parts, strict=True):
            assert torch.equal(got, -part) and got.is_contiguous()


@pytest.mark.parametrize("kind", [DimDynamic.DYNAMIC, DimDynamic.STATIC])
def test_sizes_that_are_symbols_stay_so(kind):
    """If the layout read a symbol as a number, a compiler would make a graph for each size."""
    symbols = ShapeEnv()
    mode = FakeTensorMode(shape_env=symbols)
    sizes = StatelessSymbolicContext(dynamic_sizes=[kind, DimDynamic.STATIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(5, 3, 96), symbolic_context=sizes)
    with mode:
        layout = packed_layout_of(*x.view(x.shape[0], 3, 3, 4, 8).unbind(-3))
    assert (layout is None) is (kind is DimDynamic.DYNAMIC)
    assert isinstance(x.shape[0], torch.SymInt) is (layout is None) and not symbols.guards
