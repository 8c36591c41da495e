"""Text as bytes: where it comes from, how it is split, and the loss of a bigram model of it.

A token is a byte. A training example is a window of `seq + 1` bytes: the model reads the first
`seq` of them and predicts the byte after each.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt.settings import Settings, UsageError

VOCABULARY = 256  # a token is a byte
VALIDATION_SHARE = 10  # one file in ten, or the last tenth of a single file
VALIDATION_WINDOWS = 128
# Not part of the standard library, or (encodings) tables of character codes rather than text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclass(frozen=True)
class Text:
    """Training and validation text, uint8 `[bytes]` each."""

    name: str
    train: torch.Tensor
    validation: torch.Tensor


def load_text(path: str | None) -> Text:
    """Read one file, or the sources of Python's standard library.

    A file of the library belongs to one part as a whole, so that no function is in both parts.
    Files are ordered by a hash of their names, which spreads the files of a package over both.
    """
    if path is not None:
        text = _read_file(Path(path))
        cut = len(text) - len(text) // VALIDATION_SHARE
        return Text(path, _tensor(text[:cut]), _tensor(text[cut:]))
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (file.relative_to(root) for file in root.rglob("*.py"))
    training_files = [name for name in names if SKIPPED_FOLDERS.isdisjoint(name.parts)]
    if len(training_files) < VALIDATION_SHARE:
        raise UsageError(f"{root} has no sources of the standard library; name a text with --data")
    training_files.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, name in enumerate(training_files):
        parts[i % VALIDATION_SHARE == 0].append((root / name).read_bytes())
    train, validation = (_tensor(b"".join(part)) for part in parts)
    return Text("the Python standard library's sources", train, validation)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror}") from error


def _tensor(text: bytes) -> torch.Tensor:
    if not text:  # frombuffer refuses an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """The windows that a run sees, on the model's device.

    The offsets of all steps are drawn from the seed at once, so the number of a step determines its
    windows: a resumed run continues with the right ones.
    """

    def __init__(self, text: Text, settings: Settings) -> None:
        self.batch, seq = settings.batch, settings.seq
        shortest = min(len(text.train), len(text.validation))
        if shortest <= seq:
            raise UsageError(
                f"{text.name}: the training part has {len(text.train)} bytes and the validation "
                f"part {len(text.validation)}; each needs more than --seq {seq}"
            )
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (settings.steps, self.batch)
        offsets = torch.randint(len(text.train) - seq, shape, generator=generator)
        windows = min(VALIDATION_WINDOWS, (len(text.validation) - 1) // seq)
        starts = torch.linspace(0, len(text.validation) - seq - 1, windows).long()
        self._text = text.train.to(settings.device)
        self._offsets = offsets.to(settings.device)
        # A window is one byte longer than the input: the target of each byte is the next one.
        self._within = torch.arange(seq + 1, device=settings.device)
        validation = text.validation[starts[:, None] + torch.arange(seq + 1)]
        self.validation = validation.to(settings.device).long().split(self.batch)

    def training(self, step: int) -> torch.Tensor:
        """Windows of a step, int64 `[batch, seq + 1]`."""
        return self._text[self._offsets[step][:, None] + self._within].long()


def bigram_loss(train: torch.Tensor, windows: torch.Tensor) -> float:
    """Cross-entropy of a bigram model of `train` on the bytes of `windows`, in nats per byte.

    This is the loss of a model that knows only the last byte: a model with a smaller loss uses more
    context than that.
    """
    counts = _pairs(train[:-1], train[1:]) + 0.01  # unseen pairs are unlikely, not impossible
    log_probability = (counts / counts.sum(1, keepdim=True)).log()
    seen = _pairs(windows[:, :-1].flatten(), windows[:, 1:].flatten())
    return -float((seen * log_probability).sum() / seen.sum())


def _pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How often each pair of bytes occurs, fp64 `[256, 256]`."""
    codes = first.long() * VOCABULARY + second.long()
    counts = torch.bincount(codes.cpu(), minlength=VOCABULARY**2)
    return counts.view(VOCABULARY, VOCABULARY).double()
