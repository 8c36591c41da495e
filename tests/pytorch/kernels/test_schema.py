"""Schemas of operators, made from the annotations of functions."""

from collections.abc import Sequence

import pytest
import torch

from transformer_engine.pytorch.kernels.schema import schema_of

Pair = tuple[torch.Tensor, torch.Tensor | None]


def single(
    x: torch.Tensor,
    y: torch.Tensor | None,
    dtype: torch.dtype | None,
    kind: int,
    plain: bool = True,
    name: str = "a",
    by: float = 0.5,
    *,
    launch: bool = True,
) -> Pair: ...


def several(
    sizes: tuple[int, ...],
    parts: Sequence[torch.Tensor | None],
    needs: tuple[bool, bool],
    out: list[torch.Tensor],
    last: torch.Tensor,
) -> None: ...


def nothing() -> None: ...


def one(x: torch.Tensor) -> torch.Tensor | None: ...


def test_of_every_kind():
    schema = schema_of(single)
    assert str(schema) == (
        "single(Tensor x, Tensor? y, ScalarType? dtype, int kind, bool plain, str name, float by)"
        " -> (Tensor, Tensor)"
    )
    assert [argument.default for argument in schema.arguments[3:]] == ["", "True", "'a'", "0.5"]
    assert str(schema_of(several)) == (
        "several(int[] sizes, Tensor?[] parts, bool[] needs, Tensor[] out, Tensor last) -> ()"
    )
    assert str(schema_of(nothing)) == "nothing() -> ()"
    assert str(schema_of(one)) == "one(Tensor x) -> Tensor"


def test_what_is_written_to():
    schema = schema_of(single, writes=("y", "x"))
    assert str(schema).startswith("single(Tensor(a!) x, Tensor(b!)? y, ScalarType? dtype,")
    torch._C.parse_schema(str(schema))
    assert str(schema_of(several, writes=("out",))).endswith("Tensor(a!)[] out, Tensor last) -> ()")


def of_set(x: set[int]) -> None: ...


def of_either(x: int | float | None) -> None: ...


def of_any_count() -> tuple[torch.Tensor, ...]: ...


@pytest.mark.parametrize("function", [of_set, of_either, of_any_count])
def test_what_no_operator_takes(function):
    with pytest.raises(TypeError, match="expected a type that operators take, got"):
        schema_of(function)


def test_unknown_names():
    with pytest.raises(TypeError, match=r"expected names of arguments, got .*'z'"):
        schema_of(one, writes=("z",))
