"""`Settings`: everything that determines the losses of a run, in an object that is checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SIZES = {
    "tiny": {
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "seq": 64,
        "batch": 8,
        "steps": 1000,
        "lr": 3e-3,
    },
    "125m": {
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "seq": 1024,
        "batch": 8,
        "steps": 2000,
        "lr": 6e-4,
    },
}
FP8_ALIGNMENT = 16  # FP8 GEMMs need sizes that are multiples of this


class UsageError(ValueError):
    """The user's options cannot be run; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run, which checkpoints contain. Runs of equal settings have equal losses.

    Attributes:
        data: text file to train on; None: the sources of the Python standard library.
        device: `"cpu"` or `"cuda"`.
        model: `"te"`, or `"torch"` for the same architecture in plain PyTorch.
        precision: precision of the GEMMs, `"fp32"`, `"bf16"` or `"fp8"`.
        recipe: how FP8 scales are computed, `"delayed"`, `"current"` or `"blocks"`.
        layers: number of transformer layers.
        hidden: width of the model.
        heads: attention heads of a layer.
        seq: bytes in a training window.
        batch: windows in a step.
        steps: length of the learning-rate schedule and of the run.
        lr: peak learning rate.
        dropout: probability in attention and after each block.
        seed: seed of the initial weights, the windows and dropout.
        validate_every: steps between validations.
        fp8_weights: whether the model has its weights only in FP8, and the optimizer fp32 masters.
    """

    data: str | None
    device: str
    model: str
    precision: str
    recipe: str
    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float
    dropout: float
    seed: int
    validate_every: int
    fp8_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "batch", "steps", "lr", "validate_every"):
            if getattr(self, name) <= 0:
                raise UsageError(f"--{_flag(name)} must be above 0, got {getattr(self, name)}")
        if not math.isfinite(self.lr):
            raise UsageError(f"--lr must be finite, got {self.lr}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, got {self.dropout}")
        if self.hidden % self.heads:
            raise UsageError(
                f"--hidden must be a multiple of --heads, got {self.hidden} and {self.heads}"
            )
        if self.hidden // self.heads % 2:
            raise UsageError(
                "rotary positions turn pairs, so --hidden / --heads must be even, "
                f"got {self.hidden} / {self.heads} = {self.hidden // self.heads}"
            )
        if self.precision == "fp8":
            self._check_fp8()
        elif self.fp8_weights:
            raise UsageError(f"--fp8-weights needs --precision fp8, got {self.precision}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: this machine has no CUDA GPU that torch can use")

    def _check_fp8(self) -> None:
        if self.model == "torch":
            raise UsageError("--model torch has no FP8; choose --precision fp32 or bf16")
        if self.hidden % FP8_ALIGNMENT:
            raise UsageError(
                f"--hidden must be a multiple of {FP8_ALIGNMENT} for FP8, got {self.hidden}"
            )

    @property
    def label(self) -> str:
        """Precision and recipe in words, for messages and legends."""
        if self.precision != "fp8":
            return self.precision
        return f"fp8 {self.recipe}" + (", fp8 weights" if self.fp8_weights else "")

    def differences(self, other: Settings) -> list[str]:
        """For each field that differs: the flag with the value of `other`, and the value here."""
        return [
            f"--{_flag(name)} {value} (now {getattr(self, name)})"
            for name, value in vars(other).items()
            if value != getattr(self, name)
        ]


def _flag(field: str) -> str:
    return field.replace("_", "-")
