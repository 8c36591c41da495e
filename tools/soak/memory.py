"""Lets the n-th allocation of a training step fail, for every n.

Each failure must raise an error. The next step from the same state must give the same bits as an
undisturbed step, and no tensors may stay alive. On a CPU, a library in LD_PRELOAD makes the n-th
allocation of torch fail; on a GPU, an allocator that is plugged into torch does.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outcome import Outcome, until

if TYPE_CHECKING:
    import torch

_INSIDE = "TE_SOAK_ALLOCATOR"  # the library, in the process that runs with it
_SOURCE = Path(__file__).with_name("refuse.cpp")
_CYCLES = 4  # steps after which all caches are filled
_PATIENCE = 2.0  # seconds
_RECIPES = ("delayed", "current", "blocks")


@dataclass
class Training:
    """A step of a layer, which returns its results, and a function that restores the state."""

    step: Callable[[], list[torch.Tensor]]
    restore: Callable[[], None]


def run(seconds: float, seed: int, device: str = "cpu") -> Outcome:
    """Start a process with the allocator, and return what it found."""
    if _INSIDE in os.environ:
        return _inside(seconds, seed, device)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "refuse.so"
        command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-O1", "-std=c++17"]
        subprocess.run([*command, _SOURCE, "-o", library, "-ldl"], check=True)
        found = Outcome("memory" if device == "cpu" else "memory_cuda")
        code = (
            "import json, sys, memory\n"
            f"found = memory.run({seconds}, {seed}, {device!r})\n"
            "print(json.dumps([found.figures, found.failures]))"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                _INSIDE: str(library),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
                **({"LD_PRELOAD": _preloaded(library)} if device == "cpu" else {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            found.failures.append(f"ended with {ran.returncode}: {ran.stderr[-800:]}")
        else:
            found.figures, found.failures = json.loads(ran.stdout.splitlines()[-1])
        return found


def _preloaded(library: Path) -> str:
    """LD_PRELOAD with the library at the end: a sanitizer's library must come first."""
    return " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))


def _inside(seconds: float, seed: int, device: str) -> Outcome:
    import torch  # noqa: PLC0415 - after the allocator

    library = ctypes.CDLL(os.environ[_INSIDE])
    if device != "cpu":
        plugged = torch.cuda.memory.CUDAPluggableAllocator(
            os.environ[_INSIDE], "allocate_on_gpu", "free_on_gpu"
        )
        torch.cuda.memory.change_current_allocator(plugged)
    found = Outcome("memory")
    for kind in _RECIPES:
        _refuse_each(kind, _training(kind, seed, device), seconds / len(_RECIPES), library, found)
    return found


def _refuse_each(
    kind: str, training: Training, seconds: float, library: ctypes.CDLL, found: Outcome
) -> None:
    """Let the first allocation of a step fail, then the second, until a step succeeds."""
    import torch  # noqa: PLC0415

    training.restore()
    expected = training.step()
    for _ in range(_CYCLES):
        _after(training, library)
    gc.freeze()
    before = max(_after(training, library) for _ in range(_CYCLES))
    for n in until(seconds, least=3):
        library.refuse_after(n + 1)
        try:
            training.step()
            raised = ""
        except (RuntimeError, MemoryError) as error:
            raised = f"{type(error).__name__}: {error}"
        refused = library.remaining() == 0
        library.refuse_after(0)
        if not refused:
            found.count(f"allocations in a {kind} step", n)
            break
        found.count("refused allocations")
        if "memory" not in raised:
            found.failures.append(f"{kind}, allocation {n + 1}: {raised or 'no error'}")
        training.restore()
        if (stay := _settled(library, before)) > before:
            found.failures.append(f"{kind}, allocation {n + 1}: {stay} are live, {before} before")
        if not all(map(torch.equal, expected, training.step())):
            found.failures.append(f"{kind}, allocation {n + 1}: the next step differs")
        training.restore()
    gc.unfreeze()


def _after(training: Training, library: ctypes.CDLL) -> int:
    training.step()
    training.restore()
    return _live(library)


def _settled(library: ctypes.CDLL, most: int) -> int:
    """The live objects, after waiting for autograd's own thread to release the graph."""
    end = time.monotonic() + _PATIENCE
    while (live := _live(library)) > most and time.monotonic() < end:
        time.sleep(0.01)
    return live


def _live(library: ctypes.CDLL) -> int:
    """The number of live tensors and of allocations on the GPU."""
    import torch  # noqa: PLC0415

    gc.collect()  # objects made since `gc.freeze`
    tensors = sum(isinstance(x, torch.Tensor) for x in gc.get_objects())
    return tensors + int(library.live_on_gpu())


def _training(kind: str, seed: int, device: str) -> Training:
    """The training of a TransformerLayer whose sizes depend on the seed."""
    import torch  # noqa: PLC0415

    import transformer_engine.pytorch as te  # noqa: PLC0415
    from transformer_engine.common import recipe as recipes  # noqa: PLC0415
    from transformer_engine.pytorch.fp8.scaling_state import ScalingState  # noqa: PLC0415

    torch.manual_seed(seed)
    recipe = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "blocks": recipes.Float8BlockScaling,
    }[kind]()
    heads = 2 + 2 * (seed % 2)
    hidden, tokens = 32 * heads, 16 * (1 + seed % 3)
    layer = te.TransformerLayer(
        *(hidden, 2 * hidden, heads), device=device, hidden_dropout=0.0, attention_dropout=0.0
    )
    x = torch.randn(tokens, 2, hidden, device=device)

    def step() -> list[torch.Tensor]:
        with te.fp8_autocast(fp8_recipe=recipe):
            y = layer(x)
        y.sum().backward()
        return [y.detach().clone(), *[p.grad.clone() for p in layer.parameters()]]

    step()
    states = [x for x in gc.get_objects() if isinstance(x, ScalingState)]
    values = [state.room.clone() for state in states]

    def restore() -> None:
        layer.zero_grad()
        for state, value in zip(states, values, strict=True):
            state.room.copy_(value)

    return Training(step, restore)
