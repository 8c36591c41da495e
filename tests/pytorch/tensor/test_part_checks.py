"""Loading a damaged file of a quantised tensor raises an error before a kernel reads its codes."""

import io
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    QuantizedTensor,
)
from transformer_engine.pytorch.tensor.quantized_tensor import _rebuild

SHAPE = (130, 256)
QUANTIZERS = {
    "tensor": Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3),
    "rows": Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "squares": Float8BlockQuantizer(te.DType.kFloat8E5M2, rowwise=True, columnwise=True),
}


def saved(kind: str) -> list[Any]:
    """What a file holds: class, shape, parts, facts, and `requires_grad` if it is a parameter."""
    tensor = QUANTIZERS[kind](torch.randn(SHAPE))
    return list(tensor.__reduce_ex__(2)[1])


class Damaged:
    """Is pickled as a call of `_rebuild`."""

    def __init__(self, arguments: list[Any]) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return _rebuild, tuple(self.arguments)


def loaded(arguments: list[Any]) -> Any:
    file = io.BytesIO()
    torch.save(Damaged(arguments), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_sound_parts_load(kind: str) -> None:
    arguments = saved(kind)
    assert loaded(arguments).dequantize().shape == SHAPE
    for shape in ((0, 256), (256,), (2, 65, 256)):
        arguments = list(QUANTIZERS[kind](torch.randn(shape)).__reduce_ex__(2)[1])
        assert loaded(arguments).shape == shape


PARTS = {
    "one byte of codes": (0, lambda part: part.reshape(-1)[:1]),
    "codes of another shape": (0, lambda part: part[:-1]),
    "codes in fp32": (0, lambda part: part.float()),
    "no codes": (0, lambda part: None),
    "codes of no tensor": (0, lambda part: 7),
    "sparse codes": (0, lambda part: part.to_sparse()),
    "codes elsewhere": (0, lambda part: part.to("meta")),
    "no scales": (1, lambda part: None),
    "no value in the scales": (1, lambda part: part.reshape(-1)[:0]),
    "scales in fp16": (1, lambda part: part.half()),
}


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("damage", PARTS)
def test_damaged_parts_are_refused(kind: str, damage: str) -> None:
    arguments = saved(kind)
    i, change = PARTS[damage]
    parts = list(arguments[2])
    parts[i] = change(parts[i])
    arguments[2] = tuple(parts)
    with pytest.raises(ValueError, match=r"^\[Float8\w+\] expected .*, got .*: the file"):
        loaded(arguments)


@pytest.mark.parametrize("kind", ["rows", "squares"])
@pytest.mark.parametrize("i", [2, 3])
def test_damaged_columnwise_parts_are_refused(kind: str, i: int) -> None:
    arguments = saved(kind)
    parts = list(arguments[2])
    parts[i] = parts[i][:1].clone()
    arguments[2] = tuple(parts)
    with pytest.raises(ValueError, match=r"expected _columnwise_\w+ of .* and shape"):
        loaded(arguments)


FACTS = {
    "dtype": (torch.uint8, None, "float32"),
    "fp8_dtype": (0, 99, -1, None, "E4M3"),
    "quantizer": ("quantizer", 3),
}


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in FACTS.items() for v in vs])
def test_damaged_facts_are_refused(kind: str, name: str, value: object) -> None:
    arguments = saved(kind)
    arguments[3] = {**arguments[3], name: value}
    with pytest.raises(ValueError, match="damaged"):
        loaded(arguments)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("name", ["_format", "_fp8_dtype", "parts", "dequantize", "grad_fn", 3])
def test_attributes_hide_nothing(kind: str, name: object) -> None:
    arguments = saved(kind)
    assert loaded([*arguments, {"mark": [1]}]).mark == [1]
    own = type(QUANTIZERS[kind](torch.ones(128, 128))).part_names[0]
    for hidden in (name, own):
        with pytest.raises(ValueError, match="expected names of attributes that users set"):
            loaded([*arguments, {"mark": 1, hidden: 4}])
    with pytest.raises(ValueError, match="expected a dict of attributes"):
        loaded([*arguments, [name]])


def test_other_damage_is_refused() -> None:
    kind, shape, parts, facts, _ = saved("squares")
    without = {name: fact for name, fact in facts.items() if name != "is_2D_scaled"}
    for arguments in (
        [kind, (-1, 256), parts, facts, None],
        [kind, None, parts, facts, None],
        [kind, (1 << 40, 1 << 40), parts, facts, None],
        [kind, shape, parts[:1], facts, None],
        [kind, shape, parts, without, None],
        [kind, shape, parts, {**facts, "is_2D_scaled": 2}, None],
        [QuantizedTensor, shape, parts, facts, None],
        [torch.Size, shape, parts, facts, None],
    ):
        with pytest.raises(ValueError, match=r"^\[\w+\] expected"):
            _rebuild(*arguments)
