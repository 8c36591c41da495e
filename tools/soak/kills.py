"""`kill -9` of a training with checkpoints, FP8 weights and the debugger.

After each kill the checkpoint is whole, and so is every line of the statistics but the last. The
run that goes on ends with the bits of one that was never killed.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from outcome import ROOT, Outcome, until

_OPTIONS = (
    *("--device", "cpu", "--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32"),
    *("--batch", "2", "--steps", "12", "--validate-every", "3", "--sample", "0", "--fp8-weights"),
)
_MOST_KILLS = 4  # of one run


def run(seconds: float, seed: int) -> Outcome:
    """Kill runs until time is up; less than a whole run kills none."""
    found, draw = Outcome("kills"), random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        undisturbed = Path(place) / "undisturbed"
        _start(undisturbed).wait()
        expected, whole = _checkpoint(undisturbed), time.monotonic() - began
        if expected is None:
            found.failures.append("the undisturbed run wrote no checkpoint")
            return found
        for number in until(seconds - whole):
            _one(Path(place) / str(number), draw, whole, expected, found)
    return found


def _one(folder: Path, draw: random.Random, whole: float, expected: dict, found: Outcome) -> None:
    for _ in range(draw.randint(1, _MOST_KILLS)):
        process = _start(folder)
        try:
            process.wait(draw.uniform(0.2, 1.0) * whole)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            found.count("kills")
        problem = _look(folder)
        if problem:
            found.failures.append(problem)
            return
    status = _start(folder).wait()
    actual = _checkpoint(folder)
    found.count("runs brought to their end")
    if status or actual is None:
        found.failures.append(f"the run that goes on ended with {status}: {_said(folder)}")
    elif different := [name for name in expected if not _equal(expected[name], actual[name])]:
        found.failures.append(f"other bits than those of the undisturbed run: {different}")


def _start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    checkpoint = folder / "run.pt"
    more = ["--resume"] if checkpoint.exists() else []
    command = [sys.executable, str(ROOT / "examples/train_gpt.py"), *_OPTIONS, *more]
    command += ["--checkpoint", str(checkpoint), "--plot", str(folder / "loss.png")]
    command += ["--inspect", str(ROOT / "examples/config.yaml"), "--inspect-log", str(folder)]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)


def _checkpoint(folder: Path) -> dict | None:
    path = folder / "run.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def _look(folder: Path) -> str:
    """What is torn, if anything is."""
    try:
        _checkpoint(folder)
    except Exception as error:
        return f"the checkpoint is torn: {error}"
    rows = folder / "statistics_rank-0.jsonl"
    lines = rows.read_text().split("\n") if rows.exists() else []
    for line in lines[:-1]:  # a line that was cut short is ended by the next session
        try:
            json.loads(line)
        except ValueError:
            if not line.startswith('{"iteration": ') or line.endswith("}"):
                return f"a line of the statistics is torn: {line!r}"
    return ""


def _said(folder: Path) -> str:
    return (folder / "output.txt").read_text()[-500:]


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        values = [t.dequantize() if hasattr(t, "dequantize") else t for t in (a, b)]
        return torch.equal(*values)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
