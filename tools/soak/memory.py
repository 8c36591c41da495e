"""Out of memory at the n-th allocation of a step, for every n.

Each is an error, and the step that follows from the same state has the bits of an undisturbed one.
On a CPU a library that is loaded first refuses torch's n-th allocation; on a GPU an allocator that
is plugged into torch does.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from outcome import Outcome, until

_ALLOCATOR = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
static long left;
void refuse_after(long count) { left = count; }
long remaining(void) { return left; }
int posix_memalign(void** out, size_t alignment, size_t size) {
  static int (*real)(void**, size_t, size_t);
  if (!real) real = dlsym(RTLD_NEXT, "posix_memalign");
  if (alignment == 64 && left > 0 && --left == 0) return ENOMEM;
  return real(out, alignment, size);
}
"""
_INSIDE = "TE_SOAK_ALLOCATOR"  # the library, in the process that runs with it
_CYCLES = 20  # plans of states that were replaced are kept, up to a bound that this reaches
_RECIPES = ("delayed", "current")


def run(seconds: float, seed: int) -> Outcome:
    """Start the process that runs out of memory."""
    if _INSIDE in os.environ:
        return _inside(seconds, seed)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "refuse.c", Path(folder) / "refuse.so"
        source.write_text(_ALLOCATOR)
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"], check=True
        )
        found = Outcome("memory")
        code = (
            "import json, sys, memory\n"
            f"found = memory.run({seconds}, {seed})\n"
            "print(json.dumps([found.figures, found.failures]))"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                _INSIDE: str(library),
                "LD_PRELOAD": str(library),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
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


def _inside(seconds: float, seed: int) -> Outcome:
    import torch  # noqa: PLC0415 - after the allocator

    library = ctypes.CDLL(os.environ[_INSIDE])
    found = Outcome("memory")
    for kind in _RECIPES:
        step, state, restore = _training(kind, seed)
        restore()
        expected = step()
        restore()
        before = max(_after(step, restore) for _ in range(_CYCLES))
        for n in until(seconds / len(_RECIPES), least=3):
            library.refuse_after(n + 1)
            try:
                step()
                raised = ""
            except (RuntimeError, MemoryError) as error:
                raised = f"{type(error).__name__}: {error}"
            refused = library.remaining() == 0
            library.refuse_after(0)
            if not refused:
                found.count(f"allocations of a {kind} step", n)
                break
            found.count("refused allocations")
            if "memory" not in raised:
                found.failures.append(f"{kind}, allocation {n + 1}: {raised or 'no error'}")
            restore()
            if _tensors() > before:
                found.failures.append(f"{kind}, allocation {n + 1}: tensors stay")
            for a, b in zip(expected, step(), strict=True):
                if not torch.equal(a, b):
                    found.failures.append(f"{kind}, allocation {n + 1}: the next step differs")
                    break
            restore()
        del state
    return found


def _after(step: Any, restore: Any) -> int:
    step()
    restore()
    return _tensors()


def _tensors() -> int:
    import torch  # noqa: PLC0415

    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def _training(kind: str, seed: int) -> tuple[Any, Any, Any]:
    """A step of a layer with an optimizer; its state; how to restore that."""
    import torch  # noqa: PLC0415

    import transformer_engine.pytorch as te  # noqa: PLC0415
    from transformer_engine.common.recipe import (  # noqa: PLC0415
        DelayedScaling,
        Float8CurrentScaling,
    )

    torch.manual_seed(seed)
    recipe = DelayedScaling() if kind == "delayed" else Float8CurrentScaling()
    layer = te.TransformerLayer(32, 64, 2, device="cpu", hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(16, 2, 32)

    def step() -> list[torch.Tensor]:
        with te.fp8_autocast(fp8_recipe=recipe):
            y = layer(x)
        y.sum().backward()
        return [y.detach().clone(), *[p.grad.clone() for p in layer.parameters()]]

    step()
    layer.zero_grad()
    state = {name: value.clone() for name, value in layer.state_dict().items()}

    def restore() -> None:
        layer.zero_grad()
        layer.load_state_dict(state)

    return step, state, restore
