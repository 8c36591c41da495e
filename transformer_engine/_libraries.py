"""Finds the shared libraries that are used at run time, with path and version. Needs no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from transformer_engine import _env


@dataclass(frozen=True)
class Library:
    """A shared library.

    Attributes:
        title: the usual name.
        stem: the file name without a version, `lib<name>.so`; `.<major>` is appended.
        majors: the major versions to look for, the preferred one first.
        package: the pip package that contains it; `{cuda}` stands for the major version of CUDA.
        version: returns the version of the opened library.
        variable: the NAME in the variable TE_<NAME>_PATH, which gives another file to open.
    """

    title: str
    stem: str
    majors: tuple[int, ...]
    package: str
    version: Callable[[ctypes.CDLL], str]
    variable: str


def _counted(function: str) -> Callable[[ctypes.CDLL], str]:
    """Makes a `version` for libraries whose function returns 10000 major + 100 minor + patch."""

    def ask(library: ctypes.CDLL) -> str:
        call = library[function]
        call.restype = ctypes.c_size_t
        return dotted(call())

    return ask


def _nccl_version(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return dotted(number.value)


def dotted(number: int) -> str:
    """A version number as text: 91002 becomes `9.10.2`.

    >>> dotted(130100)
    '13.1.0'
    """
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


LIBRARIES = (
    Library(
        "cuBLASLt",
        "libcublasLt.so",
        (13, 12),
        "nvidia-cublas",
        _counted("cublasLtGetVersion"),
        "CUBLASLT",
    ),
    Library(
        "cuDNN", "libcudnn.so", (9,), "nvidia-cudnn-cu{cuda}", _counted("cudnnGetVersion"), "CUDNN"
    ),
    Library("NCCL", "libnccl.so", (2,), "nvidia-nccl-cu{cuda}", _nccl_version, "NCCL"),
)


def mapped(stem: str) -> str:
    """The file of a library that this process has loaded; "" if it is not loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((path for path in paths if Path(path).name.startswith(stem)), "")


def _candidates(library: Library) -> Iterator[str]:
    """Files and names in the order in which the native module looks for them, then pip's wheels."""
    yield _env.library_path(library.variable)
    yield mapped(f"{library.stem}.")
    yield from (f"{library.stem}.{major}" for major in library.majors)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for major in library.majors:
            yield from map(str, sorted(Path(folder).glob(f"**/{library.stem}.{major}")))


def find(library: Library) -> tuple[str, str]:
    """Path and version; OSError with the reasons where no candidate opens."""
    problems = []
    for candidate in filter(None, _candidates(library)):
        try:
            opened = ctypes.CDLL(candidate)
            return mapped(Path(candidate).name) or candidate, library.version(opened)
        except (OSError, AttributeError) as error:
            problems.append(str(error))
    raise OSError("; ".join(dict.fromkeys(problems)) or "not found")


def driver() -> tuple[str, str]:
    """Version of NVIDIA's driver and of the CUDA that it runs; OSError where there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return (found[1] if found else "unknown"), cuda
