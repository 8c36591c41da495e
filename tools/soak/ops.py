"""Calls operators with random shapes, strides, offsets, dtypes, aliases and special values.

On a CPU, preferably under AddressSanitizer (`asan.sh`), a call must return or raise an error of one
of the classes in `_ERRORS`. With `--device cuda`, the same calls also run on a GPU, and the
results must agree within bounds.
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
# Bounds for sums in another order and transcendental functions, as a share of the largest value.
_BOUND = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-4}
# A larger bound for sums: tensor cores keep 10 bits of fp32 operands and 13 bits of sums of FP8.
# If terms cancel, even fewer bits of the result are correct.
_SUMS = 4e-3
_NORMS = ("norm_forward", "norm_backward")
# Results from infinities may be inf or NaN, depending on how terms near zero are rounded.
_INFINITE = (*_NORMS, "activation_forward", "activation_backward")
_WRITTEN = ("amax", "amax_history", "moments", "again", "logits")
_CASTS = ("quantize", "quantize_blocks", "transpose")  # their codes must be bitwise equal
_CODES_APART = 1.5e-2  # share of codes that may differ after a transcendental function
_SIGN = 0x80  # sign bit of a code; a zero that is the result of a sum may have either sign


def run(seconds: float, seed: int, device: str = "cpu") -> Outcome:
    """Make calls until time is up; on a GPU, compare each with the call on the CPU."""
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
    """Replace one argument by another value of the same type."""
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
    """A tensor of other strides, shape or dtype, or one of the other arguments (an alias)."""
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
    """Make a call; returns what is wrong, "" if nothing is."""
    cpu, said = _call(name, _copied(arguments, "cpu"))
    found.count("errors in words" if said else "results")
    if said and not said.startswith(_expected(said)):
        return f"raised {said}"
    if device == "cpu":
        return ""
    if _is_read_and_written(name, arguments):
        return ""  # on a GPU, threads would race
    gpu, also = _call(name, _copied(arguments, device))
    if bool(said) != bool(also):
        return f"the CPU {said or 'returned'}, the GPU {also or 'returned'}"
    return "" if said else _difference(name, cpu, gpu)


def _is_read_and_written(name: str, arguments: list[Any]) -> bool:
    """Whether a tensor that the operator writes is also one of its other arguments."""
    names = [a.name for a in getattr(torch.ops.te, name).default._schema.arguments]
    tensors = [
        (own, x.untyped_storage()._cdata)
        for own, x in zip(names, arguments, strict=False)
        if isinstance(x, torch.Tensor)
    ]
    written = {memory for own, memory in tensors if own in _WRITTEN}
    read = [memory for own, memory in tensors if own != "again"]  # which may be written in place
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
    """Copies of tensors on the device, with equal strides and offsets; aliases stay aliases."""
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
    """Describes how results differ; "" if they agree within the bounds."""
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
            about = torch.finfo(a.dtype)  # infinities count as the largest value
            x, y = (t.double().clamp(about.min, about.max) for t in (a, b))
            same = (x == y) | (x.isnan() & y.isnan())
            if name in _INFINITE:
                same |= ~(a.isfinite() | b.isfinite())
            finite = x[a.isfinite()]
            largest = finite.abs().max().item() if finite.numel() else 0.0
            narrow = a.dtype is torch.float16 or name == "softmax_backward"
            if narrow and a.isinf().any():  # cancelled terms may have been as large elsewhere
                largest = math.inf
            least_step = 2 * about.smallest_normal * about.eps
            near = (x - y).abs() <= max(max(least, _BOUND[a.dtype]) * largest, least_step)
            wrong = int((~(same | near)).sum())
            if wrong:
                return f"{wrong} of {a.numel()} elements of result {i} differ"
        elif not torch.equal(a, b):
            return f"result {i} differs"
    return ""
