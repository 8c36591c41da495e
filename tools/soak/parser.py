"""Coverage-guided fuzzing of the reader of configurations, with libFuzzer where clang is installed.

Without clang, inputs are mutations of `tests/fuzz/corpus` that are not guided by coverage.
`TE_SOAK_SANITIZE` names the sanitizers that are built in. If it is empty, twenty times as many
inputs run, and none may take more than 50 ms. `TE_SOAK_FUZZER` is the path of a fuzzer that is
built already; this command builds one, with the library that it needs, into a folder:

    TE_SOAK_SANITIZE= python tools/soak/parser.py FOLDER
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from outcome import ROOT, Outcome

_CORPUS = ROOT / "tests/fuzz/corpus"
_SLOW = 50.0  # most ms of CPU time for an input, without sanitizers
_COMPILERS = ("clang++", *(f"clang++-{version}" for version in range(21, 13, -1)))
_LENGTHS = (64, 64, 128, 16384)  # largest lengths of inputs, by seed; most are short
_NAMED = "TE_SOAK_FUZZER"


def prepare() -> None:
    """Build the fuzzer, if none is named."""
    if _NAMED not in os.environ:
        os.environ[_NAMED] = str(_build())


def run(seconds: float, seed: int) -> Outcome:
    """Fuzz for this time."""
    found = Outcome("parser")
    prepare()
    fuzzer = os.environ[_NAMED]
    # The fuzzer writes interesting inputs to files; a file system in memory is faster.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        corpus = shutil.copytree(_CORPUS, Path(folder) / "corpus")
        command = [fuzzer, str(corpus), str(int(seconds))]
        if _knows_coverage(fuzzer):
            # On a busy machine wall time says little, so the fuzzer measures CPU time itself.
            command = [fuzzer, f"-max_total_time={int(seconds)}", f"-seed={seed}", "-timeout=600"]
            command += [f"-max_len={_LENGTHS[seed % len(_LENGTHS)]}", "-reload=0", "-entropic=0"]
            command += ["-print_final_stats=1", str(corpus)]
        ran = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        said = (ran.stdout + ran.stderr).decode(errors="replace")
        broken = [p for kind in ("crash", "timeout", "oom") for p in Path(folder).glob(f"{kind}-*")]
        inputs = [base64.b85encode(zlib.compress(path.read_bytes())).decode() for path in broken]
    count = re.search(r"number_of_executed_units: (\d+)|(\d+) inputs, none crashed", said)
    sanitized = bool(re.search("built with .*(address|undefined)", said))
    what = "inputs under sanitizers" if sanitized else "inputs"
    found.count(what, int(next(filter(None, count.groups()))) if count else 0)
    slowest = float(found_ms[1]) if (found_ms := re.search(r"slowest: ([\d.]+) ms", said)) else 0.0
    found.most(f"ms of CPU time for the slowest of the {what}", slowest)
    if ran.returncode:
        found.failures.append(f"ended with {ran.returncode}: {inputs} {said[-800:]}")
    if not sanitized and slowest > _SLOW:
        found.failures.append(f"an input took {slowest} ms")
    return found


def put_into(folder: Path) -> None:
    """Build the fuzzer and copy it, with the library that it needs, for another machine."""
    fuzzer = _build()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(fuzzer, folder)
    ran = subprocess.run(["ldd", fuzzer], capture_output=True, text=True, check=True)
    if needed := re.search(r"libyaml-cpp\S* => (\S+)", ran.stdout):
        shutil.copy(needed[1], folder)


def _knows_coverage(fuzzer: str) -> bool:
    """Whether the fuzzer is built with libFuzzer, which has the option tested here."""
    ran = subprocess.run([fuzzer, "-help=1"], capture_output=True, check=False)
    return b"max_total_time" in ran.stdout + ran.stderr


def _build() -> Path:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    sanitizers = os.environ.get("TE_SOAK_SANITIZE", "address,undefined")
    build = ROOT / "build" / ("soak-fuzzer" + ("-fast" if not sanitizers else ""))
    kinds = ",".join(filter(None, ["fuzzer" if compiler else "", sanitizers]))
    options = ["-DTE_CUDA=OFF", "-DTE_PYTHON=OFF", "-DTE_TESTS=ON", "-DTE_WERROR=OFF"]
    options += [f"-DTE_SANITIZE={kinds}", "-DCMAKE_BUILD_TYPE=Release"]
    options += ["-DCMAKE_BUILD_RPATH=$ORIGIN"]
    options += [f"-DCMAKE_CXX_COMPILER={compiler}"] if compiler else []
    _quietly(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options])
    _quietly(["cmake", "--build", build, "--target", "config_fuzzer"])
    return build / "tests/fuzz/config_fuzzer"


def _quietly(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    put_into(Path(sys.argv[1]))
