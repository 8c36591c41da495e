"""Checks that the tests which run under compute-sanitizer launch every kernel of this project.

    python tools/soak kernels --device cuda --seconds 1

Several files have a `forward_kernel`, so a kernel is identified by its name and the type of its
first parameter.
"""

from __future__ import annotations

import re

import pytest
import torch
from outcome import ROOT, Outcome

_NEVER_LAUNCHED = ("nothing_kernel",)  # only its attributes are read
_VALUE = "T"  # stands for the element types of pointers
_PLAIN = ("float", "double", "__half", "BFloat16")
_IN_SOURCE = re.compile(
    r"(\w+_kernel)\(\s*(?:const\s+)?(?:__grid_constant__\s+)?(?:\w+::)*(\w*)", re.DOTALL
)
_LAUNCHED = re.compile(r"(\w+_kernel)\((?:const )?(?:\w+::)*(\w*)")


def run(seconds: float, seed: int, device: str = "cpu") -> Outcome:
    """Run the tests marked `sanitize` once, whatever `seconds` says."""
    del seconds, seed
    if device != "cuda":
        raise ValueError(f"[kernels] expected --device cuda, got {device}")
    found = Outcome("kernels_cuda")
    defined = in_sources()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.sanitize" in p.read_text()]
    with torch.profiler.profile(activities=activities) as profile:
        status = pytest.main(["-m", "sanitize", "-q", "-p", "no:cacheprovider", *map(str, files)])
        torch.cuda.synchronize()
    if status:
        found.failures.append(f"the tests ended with {status}")
    reached = {key for event in profile.events() if (key := launched(event.name)) is not None}
    found.count("kernels", len(defined))
    found.count("launched by the tests for compute-sanitizer", len(reached & defined.keys()))
    for key in sorted(defined.keys() - reached):
        found.failures.append(f"no such test launches {key[0]}({key[1]}) of {defined[key]}")
    return found


def in_sources() -> dict[tuple[str, str], str]:
    """The kernels of `csrc/cuda`, with the name of the file."""
    found = {}
    for path in sorted((ROOT / "csrc/cuda").rglob("*.cu*")):
        for part in re.sub("//.*", "", path.read_text()).split("__global__")[1:]:
            if match := _IN_SOURCE.search(part):
                found[_key(match)] = path.name
    return {key: file for key, file in found.items() if key[0] not in _NEVER_LAUNCHED}


def launched(event: str) -> tuple[str, str] | None:
    """The kernel of an event of the profiler, if it is one of ours."""
    if "te::" not in event:
        return None
    text, before = event, ""
    while text != before:  # removes template arguments, the innermost first
        text, before = re.sub(r"<[^<>]*>", "", text), text
    match = _LAUNCHED.search(text.replace("(anonymous namespace)::", ""))
    return _key(match) if match else None


def _key(match: re.Match[str]) -> tuple[str, str]:
    name, first = match.groups()
    return name, _VALUE if first in (*_PLAIN, _VALUE) else first
