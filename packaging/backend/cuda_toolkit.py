"""Finds nvcc and the headers of the CUDA libraries that are opened at run time and never linked.

Headers are taken from the first place that has them, new enough: the folder that the user names,
the toolkit of nvcc, the system, the Python environment that is installed into (torch's CUDA
libraries come as wheels with headers), the build environment. The build backend asks which wheels
the build environment must bring; CMake runs this file to get folders, and what must be left out:

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
# Headers of the toolkit changed their home with CUDA 13: wheels of CUDA 12 name it.
CUDA_OF_WHEELS_WITHOUT_SUFFIX = 13
# pip hides the environment from an isolated build by these two.
HIDING = ("PYTHONPATH", "PYTHONNOUSERSITE")
INSTALL = "TE_CUDA=ON python -m pip install --force-reinstall --no-deps ."
NAME_NVCC = f"CUDACXX=<nvcc of CUDA {'.'.join(map(str, OLDEST_NVCC))} or newer> {INSTALL}"


@dataclass(frozen=True)
class Header:
    """A header, and the wheel that brings it.

    Attributes:
        file: its name.
        wheel: requirement for pip; `{cuda}` is the major version of CUDA, `{suffix}` is "" or
            "-cu12".
        versions: the file beside it that defines its version; "" where any version will do.
        macros: the definitions in there, major first.
        least: the oldest version that compiles.
        follows_nvcc: whether its major version must be that of nvcc.
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
# What a build may lack, in the words that users read, and the headers that it takes.
PARTS = {"CUDA": ("cublas",), "cuDNN attention": ("cudnn", "cudnn_frontend", "nvrtc")}


@dataclass(frozen=True)
class Compiler:
    """nvcc.

    Attributes:
        path: its file; "" where there is none.
        version: major and minor.
        folders: where its toolkit may have headers.
        problem: why it cannot be used; "" where it can.
        command: the command that mends that.
    """

    path: str = ""
    version: tuple[int, int] = (0, 0)
    folders: tuple[Path, ...] = ()
    problem: str = ""
    command: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A part that is not built, why, and the command that builds it, run in the sources."""

    part: str
    reason: str
    command: str


@dataclass
class Found:
    """Folders of headers by name; why the others were not taken."""

    folders: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def find_nvcc(environment: Mapping[str, str]) -> str:
    """CUDACXX, CUDA_HOME and CUDA_PATH, then PATH, then the usual folder; "" without any."""
    compiler = environment.get("CUDACXX", "")
    homes = [environment.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home, "bin")) for home in homes if home]
    folders += [environment.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which(compiler or "nvcc", path=os.pathsep.join(folders)) or ""


def examine_nvcc(path: str, environment: Mapping[str, str]) -> Compiler:
    """Its version and toolkit; an empty kernel shows whether it takes the g++ that is here."""
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
    """`sys.path` of the environment that is installed into, which isolation hides, then our own."""
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
    """Folders that may have headers, the preferred first."""
    yield from compiler.folders
    yield from map(Path, ("/usr/local/cuda/include", "/usr/include"))
    yield from sorted(Path("/usr/include").glob("*-linux-gnu"))
    for path in paths:
        yield from sorted(Path(path).glob("nvidia/*/include"))
        yield Path(path, "include")


def look(
    compiler: Compiler, named: Mapping[str, str] | None = None, paths: list[str] | None = None
) -> Found:
    """Find every header.

    Args:
        compiler: whose toolkit is looked into first.
        named: folders that the user names, by name of the header.
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
    """Why a header that is there is of no use; "" where it will do."""
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
    """(12, 8) as 12.8.

    >>> dotted((12, 8))
    '12.8'
    """
    return ".".join(map(str, version)) or "of no known version"


def requirements(compiler: Compiler, found: Found) -> list[str]:
    """Wheels that bring the missing headers; none where nvcc cannot be used."""
    if compiler.problem:
        return []
    cuda = compiler.version[0]
    suffix = "" if cuda >= CUDA_OF_WHEELS_WITHOUT_SUFFIX else f"-cu{cuda}"
    return [HEADERS[name].wheel.format(cuda=cuda, suffix=suffix) for name in found.refused]


def left_out(compiler: Compiler, found: Found) -> list[LeftOut]:
    """The parts that this build must do without."""
    if compiler.problem:
        return [LeftOut("CUDA", compiler.problem, compiler.command)]
    for part, names in PARTS.items():  # without the first there is no second to speak of
        reasons = [found.refused[name] for name in names if name in found.refused]
        if reasons:
            return [LeftOut(part, "; ".join(reasons), INSTALL)]
    return []


def as_cmake(compiler: Compiler, found: Found) -> str:
    """What was found, as code for CMake."""
    lines = [f"set(TE_NVCC [==[{compiler.path}]==])"]
    lines += [
        f"set(TE_{name.upper()}_INCLUDE [==[{folder}]==])" for name, folder in found.folders.items()
    ]
    for one in left_out(compiler, found):
        texts = " ".join(f"[==[{text}]==]" for text in (one.part, one.reason, one.command))
        lines.append(f"te_leave_out({texts})")
    return "\n".join(lines)


def main() -> None:
    """Print code for CMake, or names of wheels."""
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
