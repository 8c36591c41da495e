"""Finds nvcc, and headers of CUDA libraries, which are opened at run time and never linked.

A header is taken from the first of these places that has a version that is new enough: the folder
that the user names, the toolkit of nvcc, the system, the Python environment into which the package
will be installed (torch installs CUDA libraries as wheels with headers), the build environment. The
build backend asks which wheels must be installed into the build environment. CMake runs this file
to get the folders of headers, and the parts that must be left out:

    python packaging/backend/cuda_toolkit.py [--nvcc FILE] [cublas=FOLDER ...]

With `--wheels` it prints the wheels that are missing, for builds without isolation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OLDEST_NVCC = (12, 8)
# Since CUDA 13 the names of wheels have no suffix for the version; names for CUDA 12 end in -cu12.
CUDA_OF_WHEELS_WITHOUT_SUFFIX = 13
# pip sets these variables to hide the user's environment from an isolated build.
HIDING = ("PYTHONPATH", "PYTHONNOUSERSITE")
INSTALL = "TE_CUDA=ON python -m pip install --force-reinstall --no-deps ."
NAME_NVCC = f"CUDACXX=<nvcc of CUDA {'.'.join(map(str, OLDEST_NVCC))} or newer> {INSTALL}"


@dataclass(frozen=True)
class Header:
    """A header, and the wheel that contains it.

    Attributes:
        file: name of the header.
        wheel: requirement for pip; `{cuda}` is the major version of CUDA, `{suffix}` is "" or
            "-cu12".
        versions: the file in the same folder that defines the version; "" if any version will do.
        macros: the macros of this file that define the version, major version first.
        least: the oldest version with which the code compiles.
        follows_nvcc: whether the major version must be that of nvcc.
    """

    file: str
    wheel: str
    versions: str = ""
    macros: tuple[str, ...] = ()
    least: tuple[int, ...] = ()
    follows_nvcc: bool = False


HEADERS = {
    "cublas": Header(
        "cublasLt.h",
        "nvidia-cublas{suffix}=={cuda}.*",
        "cublas_api.h",
        ("CUBLAS_VER_MAJOR", "CUBLAS_VER_MINOR"),
        OLDEST_NVCC,
        follows_nvcc=True,
    ),
    "cudnn": Header(
        "cudnn.h",
        "nvidia-cudnn-cu{cuda}>=9.14,<10",
        "cudnn_version.h",
        ("CUDNN_MAJOR", "CUDNN_MINOR"),
        (9, 14),
    ),
    "cudnn_frontend": Header(
        "cudnn_frontend.h",
        "nvidia-cudnn-frontend>=1.32",
        "cudnn_frontend_version.h",
        ("CUDNN_FRONTEND_MAJOR_VERSION", "CUDNN_FRONTEND_MINOR_VERSION"),
        (1, 32),
    ),
    "nvrtc": Header("nvrtc.h", "nvidia-cuda-nvrtc{suffix}=={cuda}.*"),
}
# The parts that a build may leave out, as users read them, and the headers that each part needs.
PARTS = {"CUDA": ("cublas",), "cuDNN attention": ("cudnn", "cudnn_frontend", "nvrtc")}


@dataclass(frozen=True)
class Compiler:
    """An nvcc, and whether it can be used.

    Attributes:
        path: path of nvcc; "" if none was found.
        version: major and minor version of CUDA.
        folders: folders of the toolkit that may contain headers.
        problem: why nvcc cannot be used; "" if it can.
        command: the command that solves the problem.
    """

    path: str = ""
    version: tuple[int, int] = (0, 0)
    folders: tuple[Path, ...] = ()
    problem: str = ""
    command: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A part that is not built, the reason, and the command (run in the sources) that builds it."""

    part: str
    reason: str
    command: str


@dataclass
class Found:
    """The folders of headers that were found, and why others were not, by name of the header."""

    folders: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def find_nvcc(environment: Mapping[str, str]) -> str:
    """Looks in CUDACXX, CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda; returns "" if not found."""
    compiler = environment.get("CUDACXX", "")
    homes = [environment.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home, "bin")) for home in homes if home]
    folders += [environment.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which(compiler or "nvcc", path=os.pathsep.join(folders)) or ""


def examine_nvcc(path: str, environment: Mapping[str, str]) -> Compiler:
    """Finds version and toolkit, and compiles an empty kernel to test whether nvcc accepts g++."""
    if not path:
        reason = "no nvcc was found in CUDACXX, CUDA_HOME, on the PATH or in /usr/local/cuda"
        return Compiler(problem=reason, command=NAME_NVCC)
    host = environment.get("CUDAHOSTCXX")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text("#include <cstddef>\n__global__ void empty() {}\n")
        command = [path, "-std=c++20", *(["-ccbin", host] if host else []), "-c", "empty.cu"]
        told = _run([*command, "--dryrun"], folder)
        done = _run([*command, "-o", "empty.o"], folder)
    top = re.search(r"^#\$ _?TOP_?=(.+)$", told.stderr, re.MULTILINE)
    release = re.search(r"release (\d+)\.(\d+)", _run([path, "--version"]).stdout)
    if release is None:
        return Compiler(path, problem=f"{path} does not tell its version", command=NAME_NVCC)
    version = (int(release[1]), int(release[2]))
    root = Path(top[1].strip()).resolve() if top else Path(path).resolve().parents[1]
    folders = (root / "include", *sorted(root.glob("targets/*/include")))
    if version < OLDEST_NVCC:
        problem = f"{path} is of CUDA {dotted(version)}, older than {dotted(OLDEST_NVCC)}"
        return Compiler(path, version, folders, problem, NAME_NVCC)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines()]
        telling = next((line for line in lines if "error" in line), " ".join(lines))
        problem = f"{path} compiles nothing here: {telling[:300]}"
        return Compiler(path, version, folders, problem, f"CUDAHOSTCXX=<an older g++> {INSTALL}")
    return Compiler(path, version, folders)


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", f"error: {error}")


def installed_paths() -> list[str]:
    """Returns `sys.path` of the environment that isolation hides, then that of this process."""
    open_environment = {k: v for k, v in os.environ.items() if k not in HIDING}
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=open_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    outside = json.loads(done.stdout) if done.returncode == 0 else []
    return [path for path in dict.fromkeys([*outside, *sys.path]) if path]


def places(compiler: Compiler, paths: list[str]) -> Iterator[Path]:
    """Yields folders that may have headers, the preferred ones first."""
    yield from compiler.folders
    yield from map(Path, ("/usr/local/cuda/include", "/usr/include"))
    yield from sorted(Path("/usr/include").glob("*-linux-gnu"))
    for path in paths:
        yield from sorted(Path(path).glob("nvidia/*/include"))
        yield Path(path, "include")


def look(
    compiler: Compiler, named: Mapping[str, str] | None = None, paths: list[str] | None = None
) -> Found:
    """Looks for every header.

    Args:
        compiler: the nvcc whose toolkit is searched first.
        named: folders that the user has named, by name of the header.
        paths: folders of Python packages; by default those of `installed_paths`.
    """
    found = Found()
    everywhere = list(places(compiler, installed_paths() if paths is None else paths))
    for name, header in HEADERS.items():
        found.refused[name] = f"{header.file} was not found"
        own = [Path(folder) for key, folder in (named or {}).items() if key == name]
        for folder in own or everywhere:
            if not (folder / header.file).is_file():
                continue
            problem = refusal(header, folder, compiler)
            if not problem:
                found.folders[name] = folder
                del found.refused[name]
                break
            found.refused[name] = problem
    return found


def refusal(header: Header, folder: Path, compiler: Compiler) -> str:
    """Returns why a header that exists cannot be used; "" if it can."""
    if not header.versions:
        return ""
    try:
        text = (folder / header.versions).read_text(errors="replace")
    except OSError:
        return f"{folder / header.file} has no {header.versions} beside it"
    numbers = [re.search(rf"define\s+{macro}\s+(\d+)", text) for macro in header.macros]
    version = tuple(int(number[1]) for number in numbers if number)
    if version < header.least:
        return f"{folder / header.file} is {dotted(version)}, older than {dotted(header.least)}"
    if header.follows_nvcc and version[0] != compiler.version[0]:
        return f"{folder / header.file} is of CUDA {version[0]}, nvcc of {compiler.version[0]}"
    return ""


def dotted(version: tuple[int, ...]) -> str:
    """Formats a version.

    >>> dotted((12, 8))
    '12.8'
    """
    return ".".join(map(str, version)) or "of no known version"


def requirements(compiler: Compiler, found: Found) -> list[str]:
    """Returns the wheels with missing headers; an empty list if nvcc cannot be used."""
    if compiler.problem:
        return []
    cuda = compiler.version[0]
    suffix = "" if cuda >= CUDA_OF_WHEELS_WITHOUT_SUFFIX else f"-cu{cuda}"
    return [HEADERS[name].wheel.format(cuda=cuda, suffix=suffix) for name in found.refused]


def left_out(compiler: Compiler, found: Found) -> list[LeftOut]:
    """Returns the parts that this build must leave out."""
    if compiler.problem:
        return [LeftOut("CUDA", compiler.problem, compiler.command)]
    for part, names in PARTS.items():  # the second part needs the first, so only one is reported
        reasons = [found.refused[name] for name in names if name in found.refused]
        if reasons:
            return [LeftOut(part, "; ".join(reasons), INSTALL)]
    return []


def as_cmake(compiler: Compiler, found: Found) -> str:
    """Returns what was found as CMake code, which SelectCuda.cmake evaluates."""
    lines = [f"set(TE_NVCC [==[{compiler.path}]==])"]
    lines += [
        f"set(TE_{name.upper()}_INCLUDE [==[{folder}]==])" for name, folder in found.folders.items()
    ]
    for one in left_out(compiler, found):
        texts = " ".join(f"[==[{text}]==]" for text in (one.part, one.reason, one.command))
        lines.append(f"te_leave_out({texts})")
    return "\n".join(lines)


def main() -> None:
    """Prints CMake code, or with --wheels the names of missing wheels."""
    parser = argparse.ArgumentParser(description="Finds nvcc and headers; prints code for CMake.")
    parser.add_argument("--wheels", action="store_true", help="print the missing wheels instead")
    parser.add_argument("--nvcc", default="", help="the compiler to use")
    parser.add_argument("named", nargs="*", help="NAME=FOLDER of a header")
    arguments = parser.parse_args()
    compiler = examine_nvcc(arguments.nvcc or find_nvcc(os.environ), os.environ)
    named = dict(one.split("=", 1) for one in arguments.named)
    found = Found() if compiler.problem else look(compiler, named)
    if arguments.wheels:
        print("\n".join(requirements(compiler, found)))
    else:
        print(as_cmake(compiler, found))


if __name__ == "__main__":
    main()
