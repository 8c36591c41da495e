"""Measures the effect of FP8 on loss and gradients of a model, for each kind of GEMM.

The model of `fidelity.py` is trained in bf16. After some of its steps, the gradients of some
batches and the validation loss are computed from the same weights in fp32, in bf16, and in FP8:
with all GEMMs in FP8, or only one kind (the debugger keeps the others in bf16). For each of these:

    error         |g - g32| / |g32| for the gradient g of a batch, root mean square over the batches
    systematic    |mean(g - g32)| / |mean g32| over the batches, which more batches do not reduce
    loss_percent  percentage by which the validation loss is above that in fp32

The row `batches` is |g32 - mean g32| / |mean g32|: how much the batches differ from each other.

    fidelity_gemms.py                      on a GPU
    fidelity_gemms.py --size tiny          also on a CPU
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from fidelity import BF16, FP8, SIZES_HERE, STEPS, settings_of
from harness import Report, require_gpu

import nvdlfw_inspect.api as debug_api
from gpt.data import Batches, load_text
from gpt.settings import Settings
from gpt.training import Training

GEMMS = ("fprop", "dgrad", "wgrad")
WARM_UP = 16  # passes that fill the histories of delayed scaling
LEAST = 1e-30


@contextmanager
def in_fp8_alone(gemm: str | None) -> Iterator[None]:
    """In the `with` block, all GEMMs but this kind run in high precision; None changes nothing."""
    if gemm is None:
        yield
        return
    others = [other for other in GEMMS if other != gemm]
    section = {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {"DisableFP8GEMM": {"enabled": True, "gemms": others}},
    }
    with tempfile.TemporaryDirectory() as folder:
        debug_api.initialize(config_file={"others": section}, log_dir=folder)
        try:
            yield
        finally:
            debug_api.end_debug()


def gradient(training: Training, windows: torch.Tensor) -> torch.Tensor:
    """The gradient of all parameters as one fp32 vector."""
    training.loss(windows).backward()
    parts = [p.grad.flatten().float() for p in training.model.parameters() if p.grad is not None]
    training.model.zero_grad()
    return torch.cat(parts)


def gradients(training: Training, batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradients of all batches, `[batches, parameters]`."""
    for windows in batches[:WARM_UP]:
        gradient(training, windows)
    return torch.stack([gradient(training, windows) for windows in batches])


def sizes_of(found: torch.Tensor) -> tuple[float, float]:
    """The root of the mean square of the norms of rows, and the norm of their mean."""
    return found.norm(dim=1).square().mean().sqrt().item(), found.mean(0).norm().item()


def apart(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """The errors of gradients relative to those in fp32."""
    size, size_of_mean = sizes_of(exact)
    error, systematic = sizes_of(found - exact)
    return {
        "error": round(error / max(size, LEAST), 5),
        "systematic": round(systematic / max(size_of_mean, LEAST), 5),
    }


def validation(training: Training) -> float:
    """Loss on the validation windows."""
    loss = training.validate()
    training.validation.clear()
    return loss


def cases() -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Name, settings, and the only kind of GEMM that runs in FP8 (None: all)."""
    yield "bf16", BF16, None
    for kind in FP8:
        for gemm in (None, *GEMMS):
            yield f"fp8 {kind['recipe']}, {gemm or 'all GEMMs'}", kind, gemm


def look(training: Training, batches: Sequence[torch.Tensor], report: Report) -> None:
    """Add a row for each case, computed from the current weights."""
    own: Settings = training.settings
    training.settings = replace(own, precision="fp32")
    exact, loss = gradients(training, batches), validation(training)
    step = {"step": training.done}
    among = sizes_of(exact - exact.mean(0))[0] / max(exact.mean(0).norm().item(), LEAST)
    report.row(op="gradients", case="batches", **step, error=round(among, 5))
    for name, kind, gemm in cases():
        training.settings = replace(own, **kind)
        with in_fp8_alone(gemm):
            found = apart(gradients(training, batches), exact)
            percent = 100 * (validation(training) / loss - 1)
        report.row(op="gradients", case=name, **step, **found, loss_percent=round(percent, 4))
        report.save()
    training.settings = own


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=[*SIZES_HERE], default="125m", help="tiny: also on a CPU")
    add("--steps", type=int, default=STEPS, help="of the whole training")
    add("--looks", type=int, default=3, help="at as many places in equal distances")
    add("--batches", type=int, default=16)
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.size != "tiny":
        require_gpu()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = settings_of(BF16, options.seed, options.size, options.steps, device)
    text = load_text(None)
    training = Training(settings, text)
    fresh = Batches(text, replace(settings, seed=settings.seed + 1))  # new batches
    batches = [fresh.training(i) for i in range(min(options.batches, options.steps))]
    report = Report("fidelity_gemms" + ("" if options.size == "125m" else f"_{options.size}"))
    for i in range(options.looks):
        training.advance(options.steps * (i + 1) // options.looks)
        look(training, batches, report)


if __name__ == "__main__":
    main()
