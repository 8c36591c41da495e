"""Checks of a quantised tensor that is loaded from a file, before kernels read its codes.

A damaged file must not make kernels read outside of the codes and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from transformer_engine.pytorch.dtypes import FP8_NAMES
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer

if TYPE_CHECKING:
    from transformer_engine.pytorch.tensor.quantized_tensor import Parts, QuantizedTensor


def check_parts(
    kind: type[QuantizedTensor], shape: torch.Size, parts: Parts, facts: Mapping[str, Any]
) -> None:
    """Raise ValueError unless a tensor of this kind and shape can consist of these parts.

    Codes must be uint8 and have as many values as `shape` says, scales must be fp32 and one for
    each block, and all must be plain tensors of one device.
    """
    _check_facts(kind, facts)
    _require(_is_shape(shape), kind, "a shape", shape)
    _require(len(parts) == len(kind.part_names), kind, f"{len(kind.part_names)} parts", len(parts))
    sides = [parts[i : i + 2] for i in range(0, len(parts), 2)]
    paired = all((codes is None) == (scales is None) for codes, scales in sides)
    there = any(codes is not None for codes, _ in sides)
    _require(paired and there, kind, "codes with their scales", [type(p).__name__ for p in parts])
    shapes = kind.part_shapes(torch.Size(shape), facts)
    for i, (name, part) in enumerate(zip(kind.part_names, parts, strict=True)):
        if part is None:
            continue
        dtype = torch.float32 if i % 2 else torch.uint8
        plain = isinstance(part, torch.Tensor) and part.layout == torch.strided
        wanted = f"{name} of {dtype} and shape {' or '.join(str(tuple(s)) for s in shapes[i])}"
        _require(plain, kind, wanted, type(part).__name__)
        fits = part.dtype == dtype and part.shape in shapes[i]
        _require(fits, kind, wanted, f"{part.dtype} and {tuple(part.shape)}")
    devices = {part.device for part in parts if part is not None}
    _require(len(devices) == 1, kind, "parts of one device", sorted(map(str, devices)))


def checked_attributes(tensor: QuantizedTensor, attributes: Any) -> dict[str, Any]:
    """Return the attributes; raise ValueError if one would hide a part or method of the tensor."""
    _require(isinstance(attributes, dict), type(tensor), "a dict of attributes", attributes)
    for name in attributes:
        free = isinstance(name, str) and name not in vars(tensor)
        own = free and not hasattr(type(tensor), name)
        _require(own, type(tensor), "names of attributes that users set", name)
    return attributes


def _check_facts(kind: type[QuantizedTensor], facts: Mapping[str, Any]) -> None:
    names = sorted(kind.fact_names)
    _require(isinstance(facts, dict) and sorted(facts) == names, kind, f"the facts {names}", facts)
    dtype, element = facts["dtype"], facts["fp8_dtype"]
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    _require(floating, kind, "a nominal dtype of floating-point numbers", dtype)
    known = isinstance(element, int) and element in FP8_NAMES
    _require(known, kind, f"the number of an FP8 type, one of {list(FP8_NAMES)}", element)
    quantizer = facts["quantizer"]
    is_one = quantizer is None or isinstance(quantizer, Quantizer)
    _require(is_one, kind, "a quantizer or None", type(quantizer).__name__)
    two = facts.get("is_2D_scaled", False)
    _require(isinstance(two, bool), kind, "is_2D_scaled to be a bool", two)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(isinstance(n, int) and n >= 0 for n in shape)


def _require(condition: bool, kind: type[QuantizedTensor], expected: str, got: object) -> None:
    if not condition:
        raise ValueError(
            f"[{kind.__name__}] expected {expected}, got {got}: the file that it comes from is "
            "damaged"
        )
