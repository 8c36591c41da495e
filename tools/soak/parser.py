"""Coverage-guided fuzzing of the reader of configurations, with libFuzzer where clang is installed.

Without clang, mutations of `tests/fuzz/corpus` that know no coverage. `TE_SOAK_SANITIZE` says which
sanitizers are built in beside the fuzzer; none of them: five times the inputs, of which none may
take more than 50 ms.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from outcome import ROOT, Outcome

_CORPUS = ROOT / "tests/fuzz/corpus"
_SLOW = 50.0  # ms of CPU time, without sanitizers
_COMPILERS = ("clang++", *(f"clang++-{version}" for version in range(21, 13, -1)))


def run(seconds: float, seed: int) -> Outcome:
    """Fuzz for so long; building comes on top."""
    found = Outcome("parser")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    sanitizers = os.environ.get("TE_SOAK_SANITIZE", "address,undefined")
    build = ROOT / "build" / ("soak-fuzzer" + ("-fast" if not sanitizers else ""))
    kinds = ",".join(filter(None, ["fuzzer" if compiler else "", sanitizers]))
    options = ["-DTE_CUDA=OFF", "-DTE_PYTHON=OFF", "-DTE_TESTS=ON", "-DTE_WERROR=OFF"]
    options += [f"-DTE_SANITIZE={kinds}", "-DCMAKE_BUILD_TYPE=Release"]
    options += [f"-DCMAKE_CXX_COMPILER={compiler}"] if compiler else []
    _quietly(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options])
    _quietly(["cmake", "--build", build, "--target", "config_fuzzer"])
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(shutil.copytree(_CORPUS, Path(folder) / "corpus"))
        fuzzer: list[str | Path] = [build / "tests/fuzz/config_fuzzer"]
        if compiler:
            # A busy machine makes inputs slow by the clock: the fuzzer takes CPU time itself.
            fuzzer += [f"-max_total_time={int(seconds)}", f"-seed={seed}", "-timeout=600"]
            fuzzer += ["-print_final_stats=1", "-max_len=16384", corpus]
        else:
            fuzzer += [corpus, str(int(seconds))]
        ran = subprocess.run(fuzzer, cwd=folder, capture_output=True, text=True, check=False)
        said = ran.stdout + ran.stderr
    count = re.search(r"number_of_executed_units: (\d+)|(\d+) inputs, none crashed", said)
    under = f"under {sanitizers}" if sanitizers else "without sanitizers"
    found.count(f"inputs {under}", int(next(filter(None, count.groups()))) if count else 0)
    slowest = float(found_ms[1]) if (found_ms := re.search(r"slowest: ([\d.]+) ms", said)) else 0.0
    found.most("ms of CPU time for the slowest", slowest)
    if ran.returncode:
        found.failures.append(f"ended with {ran.returncode}: {said[-800:]}")
    if not sanitizers and slowest > _SLOW:
        found.failures.append(f"an input took {slowest} ms")
    return found


def _quietly(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-2000:]}")
