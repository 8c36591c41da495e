"""The build backend: scikit-build-core, and on machines with nvcc the headers of CUDA libraries.

A build on a machine with nvcc should contain all CUDA code. So wheels with headers that neither the
toolkit nor the environment has become requirements of the build, see `cuda_toolkit`. With
`TE_CUDA=OFF` there are no such requirements.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

import cuda_toolkit
from scikit_build_core import build as scikit
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# A mapping or None. This file must be importable by older Pythons: pip imports it before it reports
# that Python is too old.
Settings = Any


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Returns the requirements of scikit-build-core, and wheels with the missing headers."""
    wanted = scikit.get_requires_for_build_wheel(config_settings)
    return [*wanted, *cuda_requirements(config_settings, os.environ)]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Returns the same requirements for an editable installation."""
    wanted = scikit.get_requires_for_build_editable(config_settings)
    return [*wanted, *cuda_requirements(config_settings, os.environ)]


def cuda_requirements(settings: Settings, environment: Mapping[str, str]) -> list[str]:
    """Returns the wheels with missing headers; an empty list if CUDA will not be built."""
    chosen = definitions(settings, environment)
    if chosen.get("TE_CUDA", "AUTO") == "OFF":
        return []
    nvcc = chosen.get("CMAKE_CUDA_COMPILER") or cuda_toolkit.find_nvcc(environment)
    compiler = cuda_toolkit.examine_nvcc(nvcc, environment)
    if compiler.problem:
        return []
    named = {
        name: chosen[option]
        for name in cuda_toolkit.HEADERS
        if (option := f"TE_{name.upper()}_INCLUDE") in chosen
    }
    return cuda_toolkit.requirements(compiler, cuda_toolkit.look(compiler, named))


def definitions(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the CMake options of the user: TE_CUDA=, CMAKE_ARGS=-D..., -C cmake.define.... ."""
    found = {"TE_CUDA": environment["TE_CUDA"]} if environment.get("TE_CUDA") else {}
    for word in shlex.split(environment.get("CMAKE_ARGS", "")):
        name, equals, value = word.removeprefix("-D").partition("=")
        if word.startswith("-D") and equals:
            found[name.partition(":")[0]] = value
    for key, value in (settings or {}).items():
        if "cmake.define." in key:
            found[key.partition("cmake.define.")[2]] = str(value)
    return found
