"""Kills trainings, ranks and debugger sessions with SIGKILL at random times.

After each kill, the checkpoint must be complete, and every line of the statistics except the last.
A run that is resumed must end with the same bits as a run that was never killed. If a session has
reported that the statistics of a step are written, they must be in the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outcome import ROOT, Outcome, until

_OPTIONS = (
    *("--device", "cpu", "--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32"),
    *("--batch", "2", "--steps", "12", "--validate-every", "3", "--sample", "0"),
)
_MOST_KILLS = 4  # most kills of one run
_ROWS = 9  # rows that session_to_kill.py logs in a step
_PATIENCE = 120.0  # seconds until a session reports its first step


@dataclass(frozen=True)
class Kind:
    """How a training is started; with `ranks`, one rank is killed instead of the whole training."""

    name: str
    launcher: tuple[str, ...]
    options: tuple[str, ...]
    ranks: int = 0


@dataclass(frozen=True)
class Undisturbed:
    """The checkpoint and the seconds of a run that was not killed."""

    checkpoint: dict[str, Any]
    seconds: float


_ALONE = Kind("a training", (), ("--fp8-weights",))
_RANKS = Kind(
    "a rank",
    ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    ("--ddp", "--recipe", "current"),
    ranks=2,
)


def run(seconds: float, seed: int) -> Outcome:
    """Kill runs until time is up; begin no run that the rest of the time is too short for."""
    found, draw = Outcome("kills"), random.Random(seed)
    undisturbed: dict[Kind, Undisturbed] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for number in until(seconds, least=1):
            folder = Path(place) / str(number)
            folder.mkdir()
            kind = draw.choice((_ALONE, _ALONE, _RANKS, None))
            if kind is None:
                _session(folder, draw, found)
                continue
            if kind not in undisturbed:
                whole = _undisturbed(kind, Path(place) / kind.name, found)
                if whole is None:
                    return found
                undisturbed[kind] = whole
            if seconds - (time.monotonic() - began) < undisturbed[kind].seconds:
                break
            _training(kind, folder, draw, undisturbed[kind], found)
    return found


def _undisturbed(kind: Kind, folder: Path, found: Outcome) -> Undisturbed | None:
    folder.mkdir()
    began = time.monotonic()
    _start(kind, folder).wait()
    checkpoint, seconds = _checkpoint(folder), time.monotonic() - began
    if checkpoint is None:
        found.failures.append(f"the undisturbed run wrote no checkpoint: {_said(folder)}")
        return None
    return Undisturbed(checkpoint, seconds)


def _training(
    kind: Kind, folder: Path, draw: random.Random, whole: Undisturbed, found: Outcome
) -> None:
    for _ in range(draw.randint(1, _MOST_KILLS)):
        process = _start(kind, folder)
        try:
            process.wait(draw.uniform(0.2, 1.0) * whole.seconds)
        except subprocess.TimeoutExpired:
            _kill(process, kind, draw)
            found.count(f"kills of {kind.name}")
        if problem := _look(folder):
            found.failures.append(problem)
            return
    status = _start(kind, folder).wait()
    actual, expected = _checkpoint(folder), whole.checkpoint
    found.count("runs brought to their end")
    if status or actual is None:
        found.failures.append(f"the run that goes on ended with {status}: {_said(folder)}")
    elif different := [name for name in expected if not _equal(expected[name], actual[name])]:
        found.failures.append(f"other bits than those of the undisturbed run: {different}")


def _kill(process: subprocess.Popen[bytes], kind: Kind, draw: random.Random) -> None:
    """Kill the training, or one rank, after which the launcher ends the others."""
    children = _children(process.pid) if kind.ranks else []
    victim = draw.choice(children) if children else process.pid
    with contextlib.suppress(ProcessLookupError):  # the process has ended already
        os.kill(victim, signal.SIGKILL)
    if victim == process.pid:
        process.wait()
        return
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def _start(kind: Kind, folder: Path) -> subprocess.Popen[bytes]:
    checkpoint = folder / "run.pt"
    more = ["--resume"] if checkpoint.exists() else []
    command = [sys.executable, *kind.launcher, str(ROOT / "examples/train_gpt.py")]
    command += [*_OPTIONS, *kind.options, *more]
    command += ["--checkpoint", str(checkpoint), "--plot", str(folder / "loss.png")]
    command += ["--inspect", str(ROOT / "examples/config.yaml"), "--inspect-log", str(folder)]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)


def _checkpoint(folder: Path) -> dict[str, Any] | None:
    path = folder / "run.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def _session(folder: Path, draw: random.Random, found: Outcome) -> None:
    """Kill a session, and count the rows of the steps that it has reported."""
    said = folder / "output.txt"
    command = [sys.executable, str(Path(__file__).with_name("session_to_kill.py")), str(folder)]
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    end = time.monotonic() + _PATIENCE
    while not said.stat().st_size and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(draw.uniform(0.0, 1.0))
    process.kill()
    process.wait()
    found.count("kills of a session")
    if problem := _look(folder):
        found.failures.append(problem)
        return
    lines = said.read_text().split("\n")
    steps = [int(line) for line in lines[:-1] if line.isdecimal()]
    if not steps:
        found.failures.append(f"the session made no step: {_said(folder)}")
        return
    rows = [json.loads(line) for line in _rows(folder)]
    written = [sum(row["iteration"] == step for row in rows) for step in steps]
    if lost := [step for step, count in zip(steps, written, strict=True) if count != _ROWS]:
        found.failures.append(f"steps that were said to be written are not: {lost[:5]}")


def _rows(folder: Path, rank: int = 0) -> list[str]:
    """The complete lines of the statistics: all that end with a line feed."""
    path = folder / f"statistics_rank-{rank}.jsonl"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _look(folder: Path) -> str:
    """Describes a damaged checkpoint or line; "" if there is none."""
    try:
        _checkpoint(folder)
    except Exception as error:
        return f"the checkpoint is torn: {error}"
    for line in _rows(folder) + _rows(folder, 1):  # the next session has ended a cut line
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
