"""Runs of train_gpt.py on a text and a model small enough for a test."""

import random
from pathlib import Path
from typing import Any

import torch

import train_gpt

LAYERS, STEPS, VALIDATIONS, VALIDATION_BATCHES = 1, 24, 4, 4
SIZE = f"--layers {LAYERS} --hidden 32 --heads 2 --seq 32 --batch 4 --steps {STEPS} --lr 1e-2"
TINY = [*SIZE.split(), "--validate-every", str(STEPS // VALIDATIONS)]


def write_text() -> None:
    """Writes a text to train on into the working directory."""
    words = random.Random(0).choices(["scale", "amax", "history", "of", "the", "tensor"], k=3000)
    text = " ".join(words).encode()
    windows = VALIDATION_BATCHES * 4 * 32
    Path("text").write_bytes(text[: 10 * (windows + 1)])


def run(*arguments: str, device: str = "cpu") -> int:
    """Runs the example and returns its exit status."""
    return train_gpt.main([*TINY, "--data", "text", "--device", device, *arguments])


def assert_same_run(one: str, other: str) -> dict[str, Any]:
    """Asserts that two finished runs have equal losses, validations, weights and scales.

    Returns the first run.
    """
    whole, parts = (torch.load(name, weights_only=True) for name in (one, other))
    assert whole["done"] == parts["done"] == STEPS
    assert whole["validation"] == parts["validation"]
    assert torch.equal(whole["losses"], parts["losses"])
    for kind in ("model", "masters"):
        assert whole[kind].keys() == parts[kind].keys()
        for name, tensor in whole[kind].items():
            assert torch.equal(tensor, parts[kind][name]), name
    return whole
