#!/usr/bin/env python3
"""Continue a text with a model that train_gpt.py has trained.

    python examples/train_gpt.py --checkpoint run.pt
    python examples/generate.py run.pt --prompt "def " --prompt "class "

A cache holds the keys and values of earlier bytes (`te.InferenceParams`), so that each step of the
model processes one new byte. `--graph` captures that step in a CUDA graph, which the host then only
replays: small models write several times as fast. `--check` also writes the text without the cache
and compares both.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from gpt import report
from gpt.checkpoint import read_checkpoint
from gpt.generation import Written, cast_once, without_cache, write
from gpt.model import build_model
from gpt.settings import Settings, UsageError


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser, with help for every option."""
    parser = argparse.ArgumentParser(description="Generate text with a cache of keys and values.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="what train_gpt.py --checkpoint wrote")
    add("--prompt", action="append", metavar="TEXT", help="several are written at once ('\\ndef ')")
    add("--bytes", type=int, metavar="N", help="bytes to write (up to the model's window)")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest byte (0)")
    add("--seed", type=int, default=1, help="of the dice, with a temperature (1)")
    add("--device", choices=("cpu", "cuda"), help="where (cuda if there is a GPU, else cpu)")
    add("--precision", choices=("fp32", "bf16", "fp8"), help="of the GEMMs (as trained)")
    add("--graph", action="store_true", help="replay one CUDA graph for each byte; a CPU has none")
    add("--check", action="store_true", help="compare with generation without a cache")
    return parser


def load(options: argparse.Namespace) -> tuple[Settings, torch.nn.Module]:
    """The settings and the model of a checkpoint."""
    state = read_checkpoint(options.checkpoint)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = replace(Settings(**state["settings"]), device=device)
    if options.precision:
        settings = replace(settings, precision=options.precision)
    if settings.model == "torch" and options.graph:
        raise UsageError("the checkpoint is of --model torch, whose cache is not made for --graph")
    model = build_model(settings)
    model.load_state_dict(state["model"])
    return settings, cast_once(model.eval(), settings)


def show(written: Written, prompts: list[str]) -> None:
    """Print the texts, and how many bytes were generated in a second."""
    for prompt, text in zip(prompts, written.texts, strict=True):
        print(f"--- {prompt!r}")
        print(report.readable(text))
    print("---")
    print(f"{written.steps} steps of {len(prompts)}: {written.rate:,.0f} bytes/s with the cache")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if --check finds a difference, 2 for options that are wrong."""
    options = make_parser().parse_args(arguments)
    try:
        settings, model = load(options)
        if options.temperature < 0:
            raise UsageError(f"--temperature must not be negative, got {options.temperature}")
        prompts = options.prompt or ["\ndef "]
        longest = max(len(prompt.encode()) for prompt in prompts)
        count = settings.seq - longest if options.bytes is None else options.bytes
        task = (model, settings, prompts, count, options.temperature, options.seed)
        written = write(*task, graph=options.graph)
        show(written, prompts)
        if not options.check:
            return 0
        begin = time.perf_counter()
        plain = without_cache(*task)
        rate = len(prompts) * count / (time.perf_counter() - begin)
        same = plain == written.texts
        print(f"{rate:,.0f} bytes/s without; the texts are {'the same' if same else 'DIFFERENT'}")
        return 0 if same else 1
    except UsageError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
