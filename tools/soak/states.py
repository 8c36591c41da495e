"""Loads damaged states: `_extra_state` of modules, pickled FP8 tensors, and optimizer states.

Loading must succeed or raise an error with a message. A state that loads is used: by a forward and
a backward of the module, an operation on the tensor, or a step of the optimizer.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable
from typing import Any

import torch
from outcome import Outcome, until

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling
from transformer_engine.pytorch.optimizers import FusedAdam

_ERRORS = (ValueError, TypeError, NotImplementedError, RuntimeError)
_INTEGERS = (-1, 0, 1, 2, 3, 5, 6, 7, 16, 1024, 1 << 20, 1 << 31, (1 << 63) - 1)
_OTHERS: tuple[Any, ...] = (None, "text", 1, -1.0, b"bytes", [], {}, torch.tensor(1), torch.float32)


def run(seconds: float, seed: int) -> Outcome:
    """Load states until time is up."""
    found, draw = Outcome("states"), random.Random(seed)
    torch.manual_seed(seed)
    trials = (_extra_states(), _fp8_tensors(), _optimizers())
    for number in until(seconds, least=30):
        drawn = draw.randrange(1 << 40)
        try:
            trials[number % len(trials)](random.Random(drawn))
            found.count("loaded")
        except _ERRORS as error:
            if not str(error):
                found.failures.append(f"{drawn}: {type(error).__name__} without words")
            found.count("refused")
        except Exception as error:
            found.failures.append(f"trial {number % 3}, {drawn}: {type(error).__name__}: {error}")
    return found


def _extra_states() -> Callable[[random.Random], None]:
    module = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32)
    _step(module, x)
    good = module.state_dict()

    def trial(draw: random.Random) -> None:
        other = te.Linear(32, 32, device="cpu")
        state = {**good, "_extra_state": _damaged_bytes(good["_extra_state"], draw)}
        other.load_state_dict(state)
        _step(other, x)

    return trial


def _step(module: torch.nn.Module, x: torch.Tensor) -> None:
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
        y = module(x)
    y.sum().backward()


def _damaged_bytes(state: torch.Tensor, draw: random.Random) -> Any:
    raw = bytearray(state.as_subclass(torch.Tensor).numpy().tobytes())
    kind = draw.randrange(7)
    if kind == 0:
        return draw.choice(_OTHERS)
    if kind == 1:
        raw = raw[: draw.randrange(len(raw))]
    elif kind == 2:
        raw += draw.randbytes(draw.randint(1, 64))
    elif kind == 3:
        at = 8 + 4 * draw.randrange(3)  # a count of the header
        raw[at : at + 4] = struct.pack("<i", draw.choice((-1, 0, 1, 2, 7, 1 << 20, (1 << 31) - 1)))
    elif kind == 4:
        at = 20 + 4 * draw.randrange((len(raw) - 20) // 4)  # a number
        raw[at : at + 4] = struct.pack("<f", draw.choice((0.0, -1.0, 1e-45, 3e38, float("nan"))))
    else:
        for _ in range(draw.randint(1, 8)):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    made = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return made[::2] if kind == 6 else made.clone()


def _fp8_tensors() -> Callable[[random.Random], None]:
    tensors = []
    for recipe in (DelayedScaling(), Float8BlockScaling()):
        with te.fp8_model_init(enabled=True, recipe=recipe):
            tensors.append(te.Linear(128, 128, device="cpu").weight.detach())

    def trial(draw: random.Random) -> None:
        rebuild, arguments = draw.choice(tensors).__reduce_ex__(2)
        damaged = _damaged(copy.copy(list(arguments)), draw)
        made = rebuild(*damaged)
        made.dequantize().sum()
        made.clone().t()

    return trial


def _optimizers() -> Callable[[random.Random], None]:
    weight = torch.nn.Parameter(torch.randn(16, 16))

    def made() -> FusedAdam:
        return FusedAdam([weight], lr=1e-3)

    def step(optimizer: FusedAdam) -> None:
        weight.grad = torch.randn_like(weight)
        optimizer.step()

    first = made()
    step(first)
    good = first.state_dict()

    def trial(draw: random.Random) -> None:
        optimizer, state = made(), copy.deepcopy(good)
        place = draw.choice((state["state"][0], state["param_groups"][0], state["state"]))
        key = draw.choice(list(place))
        place[key] = _other(place[key], draw)
        optimizer.load_state_dict(state)
        step(optimizer)

    return trial


def _damaged(arguments: list[Any], draw: random.Random) -> list[Any]:
    """The arguments with one of them, or one element of it, replaced."""
    at = draw.randrange(1, len(arguments))
    value = arguments[at]
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        arguments[at] = {**value, key: _other(value[key], draw)}
    elif isinstance(value, list | tuple) and value and draw.random() < 0.8:
        items = list(value)
        inside = draw.randrange(len(items))
        items[inside] = _other(items[inside], draw)
        arguments[at] = items
    else:
        arguments[at] = _other(value, draw)
    return arguments


def _other(value: Any, draw: random.Random) -> Any:
    kind = draw.randrange(6)
    if isinstance(value, torch.Tensor) and kind:
        return (
            value.reshape(-1)[: draw.randrange(value.numel() + 1)],
            value.t() if value.dim() == 2 else value,
            value.to(draw.choice((torch.float64, torch.int32, torch.uint8))),
            value.expand(2, *value.shape),
            value.to_sparse() if value.dim() == 2 else value[None],
        )[kind - 1]
    if isinstance(value, int) and kind:
        return draw.choice(_INTEGERS)
    return draw.choice(_OTHERS)
