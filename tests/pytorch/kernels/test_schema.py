"""Schemas of operators, from annotations."""

from collections.abc import Sequence

import pytest
import torch

from transformer_engine.pytorch.kernels.schema import schema_of

Pair = tuple[torch.Tensor, torch.Tensor | None]


def every_kind(
    x: torch.Tensor,
    y: torch.Tensor | None,
    dtype: torch.dtype | None,
    sizes: tuple[int, ...],
    parts: Sequence[torch.Tensor | None],
    needs: tuple[bool, bool],
    name: str = "a",
    by: float = 0.5,
    out: list[torch.Tensor] = [],  # noqa: B006
    *,
    launch: bool = True,
) -> Pair: ...


def nothing() -> None: ...


def one(x: torch.Tensor) -> torch.Tensor | None: ...


def test_of_every_kind():
    schema = schema_of(every_kind, writes=("y", "out"))
    assert str(schema) == (
        "every_kind(Tensor x, Tensor(a!)? y, ScalarType? dtype, int[] sizes, Tensor?[] parts,"
        " bool[] needs, str name, float by, Tensor(b!)[] out) -> (Tensor, Tensor)"
    )
    assert [argument.default for argument in schema.arguments[5:]] == ["", "'a'", "0.5", "[]"]
    torch._C.parse_schema(str(schema))
    assert str(schema_of(nothing)) == "nothing() -> ()"
    assert str(schema_of(one)) == "one(Tensor x) -> Tensor"


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
