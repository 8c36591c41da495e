"""Runs the native code under ThreadSanitizer: C++ tests, and Python threads with the debugger.

The C++ tests run repeatedly in random order. In between, Python threads use a session of
`nvdlfw_inspect` at the same time (`sessions.py`), with an instrumented engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outcome import ROOT, Outcome, until

_BUILD = ROOT / "build/soak-threads"
_FOUND = "66"  # exit status of a process with a data race
_ROUNDS = 20


def prepare() -> None:
    """Build the tests and the engine."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(_BUILD), "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g", "-DTE_CUDA=OFF"]
    configure += ["-DTE_TESTS=ON", "-DTE_SANITIZE=thread", f"-DPython_EXECUTABLE={sys.executable}"]
    build = ["cmake", "--build", str(_BUILD), "--target", "te_tests", "_engine"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])


def run(seconds: float, seed: int) -> Outcome:
    """Run the C++ tests and the Python threads in turns until time is up."""
    found = Outcome("threads")
    if not (_BUILD / "build.ninja").exists():
        prepare()
    tests = str(_BUILD / "tests/cpp/te_tests")
    with tempfile.TemporaryDirectory() as folder:
        packages = _instrumented(Path(folder))
        for number in until(seconds):
            drawn = str((seed + number) % 99999 + 1)
            order = ["--gtest_shuffle", f"--gtest_random_seed={drawn}"]
            said = _watched([tests, *order], {}, f"C++ tests, order {drawn}", found)
            ran = re.search(r"(\d+) tests from .* ran", said)
            found.count("C++ tests run", int(ran[1]) if ran else 0)
            sessions = [sys.executable, str(Path(__file__).with_name("sessions.py")), str(_ROUNDS)]
            said = _watched(sessions, _preloaded(packages), "threads of Python", found)
            found.count("rounds of Python threads", len(re.findall("^round", said, re.MULTILINE)))
    return found


def _instrumented(folder: Path) -> Path:
    """A copy of `nvdlfw_inspect` with the engine that was built here."""
    leave = shutil.ignore_patterns("*.so", "__pycache__")
    package = shutil.copytree(ROOT / "nvdlfw_inspect", folder / "nvdlfw_inspect", ignore=leave)
    for engine in (_BUILD / "csrc").glob("_engine.*.so"):
        shutil.copy(engine, package)
    return folder


def _preloaded(packages: Path) -> dict[str, str]:
    compiler = os.environ.get("CXX", "c++")
    named = [compiler, "-print-file-name=libtsan.so"]
    library = subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()
    return {"LD_PRELOAD": library, "PYTHONPATH": str(packages)}


def _watched(command: list[str], more: dict[str, str], what: str, found: Outcome) -> str:
    options = f"exitcode={_FOUND}:die_after_fork=0"
    ran = subprocess.run(
        command,
        env={**os.environ, **more, "TSAN_OPTIONS": options},
        capture_output=True,
        text=True,
        check=False,
    )
    said = ran.stdout + ran.stderr
    if ran.returncode:
        found.failures.append(f"{what}: ended with {ran.returncode}: {said[-3000:]}")
    return said


if __name__ == "__main__":
    prepare()
