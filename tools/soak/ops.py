"""Operators with random shapes, strides, offsets, dtypes, aliases and special values.

On a CPU, run under AddressSanitizer (`asan.sh`), a call returns or raises one of our kinds of
errors. With a GPU the same calls run there, too, and agree within the bounds of the definition.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from op_arguments import DTYPES, OPERATORS, Draw
from outcome import Outcome, until

import transformer_engine.pytorch

_ = transformer_engine.pytorch  # registers the operators
_ERRORS = (ValueError, TypeError, NotImplementedError, RuntimeError)
_NUMBERS = (-1, 0, 1, 2, 5, 6, 7, 16, 1 << 31, 1 << 40)
# Of a sum in another order, and of a transcendental function, as a share of the largest value.
_BOUND = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-4}
# Tensor cores keep 10 bits of fp32 and 13 of sums of FP8; what is left of values that cancel has
# fewer right bits than they had.
_SUMS = 4e-3
_NORMS = ("norm_forward", "norm_backward")
# Behind infinities inf or NaN, as terms that are nearly zero are rounded.
_INFINITE = (*_NORMS, "activation_forward", "activation_backward")
_WRITTEN = ("amax", "amax_history", "moments", "again", "logits")
_CASTS = ("quantize", "quantize_blocks", "transpose")  # whose codes are the same bits
_CODES_APART = 1.5e-2  # share of codes that may differ behind a transcendental function
_SIGN = 0x80  # of a code; a zero that a sum has made has either


def run(seconds: float, seed: int, device: str = "cpu") -> Outcome:
    """Calls until time is up; on a GPU each is compared with the CPU's."""
    found = Outcome("ops" if device == "cpu" else "ops_cuda")
    names = list(OPERATORS)
    for number in until(seconds, least=len(names)):
        name, draw = names[number % len(names)], Draw(seed + number)
        arguments = list(OPERATORS[name](draw))
        if draw.random.random() < 0.5:
            _mutate(arguments, draw)
        found.count("calls")
        problem = _try(name, arguments, device, found)
        if problem:
            found.failures.append(f"{name}, seed {seed + number}: {problem}")
    return found


def _mutate(arguments: list[Any], draw: Draw) -> None:
    """Make one argument another one of its kind."""
    at = draw.random.randrange(len(arguments))
    value = arguments[at]
    if isinstance(value, torch.Tensor):
        arguments[at] = _other_tensor(value, arguments, draw)
    elif isinstance(value, bool):
        arguments[at] = not value
    elif isinstance(value, int):
        arguments[at] = draw.one(_NUMBERS)
    elif isinstance(value, float):
        arguments[at] = draw.one((0.0, -1.0, float("nan"), float("inf"), 1e30))
    elif isinstance(value, torch.dtype):
        arguments[at] = draw.one((*DTYPES, torch.int32, torch.float64))


def _other_tensor(x: torch.Tensor, arguments: list[Any], draw: Draw) -> Any:
    """Of other strides, shape, dtype or values, or one that is an argument already."""
    others = [a for a in arguments if isinstance(a, torch.Tensor)]
    kind = draw.random.randrange(8)
    if kind == 0:
        return x.t() if x.dim() == 2 else x.flip(0)
    if kind == 1:
        return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x
    if kind == 2:
        return x[:1].expand_as(x) if x.dim() and len(x) else x
    if kind == 3:
        return x[:0] if x.dim() else x
    if kind == 4:
        return x.to(draw.one((*DTYPES, torch.int64, torch.uint8, torch.float64)))
    if kind == 5:
        return torch.cat([x, x]) if x.dim() else x.reshape(1, 1)
    if kind == 6:
        return draw.one(others)
    return torch._neg_view(x) if x.is_floating_point() else x.reshape(-1)


def _try(name: str, arguments: list[Any], device: str, found: Outcome) -> str:
    """What is wrong, if anything is."""
    cpu, said = _call(name, _copied(arguments, "cpu"))
    found.count("errors in words" if said else "results")
    if said and not said.startswith(_expected(said)):
        return f"raised {said}"
    if device == "cpu":
        return ""
    if _is_read_and_written(name, arguments):
        return ""  # on a GPU, some threads read what others have written
    gpu, also = _call(name, _copied(arguments, device))
    if bool(said) != bool(also):
        return f"the CPU {said or 'returned'}, the GPU {also or 'returned'}"
    return "" if said else _difference(name, cpu, gpu)


def _is_read_and_written(name: str, arguments: list[Any]) -> bool:
    """Whether a tensor that the operator writes is another of its arguments, too."""
    names = [a.name for a in getattr(torch.ops.te, name).default._schema.arguments]
    tensors = [
        (own, x.untyped_storage()._cdata)
        for own, x in zip(names, arguments, strict=False)
        if isinstance(x, torch.Tensor)
    ]
    written = {memory for own, memory in tensors if own in _WRITTEN}
    read = [memory for own, memory in tensors if own != "again"]  # which may be in place
    return any(read.count(memory) > 1 for memory in written)


def _expected(said: str) -> tuple[str, ...]:
    return tuple(f"{kind.__name__}: " for kind in _ERRORS)


def _call(name: str, arguments: list[Any]) -> tuple[list[torch.Tensor], str]:
    try:
        made = getattr(torch.ops.te, name)(*arguments)
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    results = [made] if isinstance(made, torch.Tensor) else list(made or ())
    written = [a for a in arguments if isinstance(a, torch.Tensor)]
    return [t.cpu() for t in (*results, *written) if isinstance(t, torch.Tensor)], ""


def _copied(arguments: list[Any], device: str) -> list[Any]:
    """Tensors on the device, of equal strides and offsets; aliases stay aliases."""
    made: dict[int, torch.Tensor] = {}
    rooms: dict[int, torch.Tensor] = {}

    def copy(x: torch.Tensor) -> torch.Tensor:
        if x.is_neg():
            return torch._neg_view(copy(torch._neg_view(x)))
        base = x.untyped_storage()
        if base._cdata not in rooms:
            room = torch.empty(0, dtype=x.dtype).set_(base)
            rooms[base._cdata] = room.clone().to(device)
        own = rooms[base._cdata].view(x.dtype)
        return own.as_strided(x.shape, x.stride(), x.storage_offset())

    for x in arguments:
        if isinstance(x, torch.Tensor) and id(x) not in made:
            made[id(x)] = copy(x)
    return [made[id(x)] if isinstance(x, torch.Tensor) else x for x in arguments]


def _difference(name: str, expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str:
    """In words; empty within the bounds."""
    least = _SUMS if name in ("gemm", *_NORMS) else 0.0
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {b.dtype} {tuple(b.shape)} instead of {a.dtype} {tuple(a.shape)}"
        if a.dtype is torch.uint8:
            wrong = a != b
            if name not in _CASTS:
                wrong &= (a | b | _SIGN) != _SIGN
            apart = wrong.float().mean().item() if a.numel() else 0.0
            most = 0.0 if name in _CASTS else max(2.0, _CODES_APART * a.numel())
            if apart * a.numel() > most:
                return f"{apart:.1%} of the codes of result {i} differ"
        elif a.is_floating_point():
            about = torch.finfo(a.dtype)  # a value beyond the largest one is near the largest one
            x, y = (t.double().clamp(about.min, about.max) for t in (a, b))
            same = (x == y) | (x.isnan() & y.isnan())
            if name in _INFINITE:
                same |= ~(a.isfinite() | b.isfinite())
            finite = x[a.isfinite()]
            largest = finite.abs().max().item() if finite.numel() else 0.0
            narrow = a.dtype is torch.float16 or name == "softmax_backward"
            if narrow and a.isinf().any():  # what has cancelled elsewhere was as large
                largest = math.inf
            least_step = 2 * about.smallest_normal * about.eps
            near = (x - y).abs() <= max(max(least, _BOUND[a.dtype]) * largest, least_step)
            wrong = int((~(same | near)).sum())
            if wrong:
                return f"{wrong} of {a.numel()} elements of result {i} differ"
        elif not torch.equal(a, b):
            return f"result {i} differs"
    return ""
