"""Runs a soak test in many processes with different seeds, and adds up what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from outcome import Outcome

_APART = (1 << 24) + 1  # difference of two seeds; a test also uses the seeds after its own
_PATIENCE = 300.0  # further seconds for the start and the last round


def run_jobs(name: str, seconds: float, seed: int, jobs: int, device: str) -> Outcome:
    """Run `jobs` processes at once. A process that dies or does not end is a failure."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        running = [
            _start(name, seconds, seed + job * _APART, device, folder / str(job))
            for job in range(jobs)
        ]
        found = Outcome(name if device == "cpu" else f"{name}_{device}")
        for job, process in enumerate(running):
            found.add(_end(process, 1.5 * seconds + _PATIENCE, folder / str(job)))
    return found


def _start(
    name: str, seconds: float, seed: int, device: str, place: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).with_name("__main__.py")), name]
    command += [f"--seconds={seconds}", f"--seed={seed}", f"--device={device}"]
    command += [f"--outcome={place.with_suffix('.json')}"]
    with place.with_suffix(".txt").open("wb") as said:  # one thread: other cores have jobs
        one = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=said, stderr=said, env=one)


def _end(process: subprocess.Popen[bytes], seconds: float, place: Path) -> Outcome:
    try:
        status: int | str = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = f"more than {seconds:.0f} s"
    written = place.with_suffix(".json")
    if written.exists():
        return Outcome(**json.loads(written.read_text()))
    said = place.with_suffix(".txt").read_text(errors="replace")
    return Outcome("", failures=[f"a job ended with {status}: {said[-4000:]}"])
