#!/usr/bin/env python3
"""Train a small GPT on text, byte by byte, in FP8.

    python examples/train_gpt.py                      # a minute on a CPU; 125M parameters on a GPU
    python examples/train_gpt.py --compare            # fp8, delayed and current, against bf16
    python examples/train_gpt.py --checkpoint run.pt  # and later the same with --resume
    python examples/train_gpt.py --inspect examples/config.yaml  # statistics of every GEMM
    torchrun --nproc-per-node 2 examples/train_gpt.py --fsdp     # on two GPUs, or two CPU processes
    torchrun --nproc-per-node 4 examples/train_gpt.py --tp 2 --sp --cp 2

The parts are in `gpt/`: settings, data, model (the te modules), training (the loop), ranks (for
several GPUs), masters (for FP8 weights), inspection (by the debugger), report.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import transformer_engine.pytorch as te
from gpt import report
from gpt.checkpoint import read_checkpoint
from gpt.data import Text, bigram_loss, load_text
from gpt.inspection import inspection
from gpt.options import as_before, command_to_go_on, named_options, notes
from gpt.ranks import Layout, Ranks, joined
from gpt.settings import SIZES, Settings, UsageError
from gpt.training import Training

INTERRUPTED = Path("train_gpt.pt")  # the checkpoint that Ctrl-C writes without --checkpoint
INTERRUPT_STATUS = 130  # exit status of a process that Ctrl-C has ended
STRETCH = 10  # steps between two reads of the loss, each of which waits for the device
COMPARED = (
    {"precision": "bf16", "fp8_weights": False},
    {"recipe": "delayed"},
    {"recipe": "current"},
)


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser, with help for every option."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on text, byte by byte, in FP8. Losses are in nats per byte.",
        usage="%(prog)s [options]   (--help lists them)",
        allow_abbrev=False,  # command_to_go_on searches for full names
    )
    add = parser.add_argument_group("what is trained").add_argument
    add("--data", metavar="FILE", help="text to train on (the Python standard library's sources)")
    add("--device", choices=("cpu", "cuda"), help="where (cuda if there is a GPU, else cpu)")
    add("--precision", choices=("fp32", "bf16", "fp8"), default="fp8", help="of the GEMMs (fp8)")
    add(
        "--recipe",
        choices=("delayed", "current", "blocks"),
        default="delayed",
        help="where FP8 scales come from: the last steps, the tensor or its blocks (delayed)",
    )
    add("--fp8-weights", action="store_true", help="weights in FP8 alone, masters in the optimizer")
    add("--model", choices=("te", "torch"), default="te", help="torch: no te modules, no FP8 (te)")
    add("--seed", type=int, default=1, help="of weights and data order (1)")

    add = parser.add_argument_group("size; each option changes one number of --size").add_argument
    add("--size", choices=SIZES, help="which defaults (tiny on a CPU, 125m on a GPU)")
    for name, meaning in {
        "layers": "transformer layers",
        "hidden": "width of the model",
        "heads": "attention heads of a layer",
        "seq": "bytes in a training window",
        "batch": "windows in a step",
        "steps": "optimizer steps",
    }.items():
        defaults = ", ".join(f"{size} {values[name]}" for size, values in SIZES.items())
        add(f"--{name}", type=int, metavar="N", help=f"{meaning} ({defaults})")
    add("--lr", type=float, metavar="RATE", help="peak learning rate (tiny 3e-3, 125m 6e-4)")
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout probability (0)")

    add_layouts(parser)
    add_results(parser)

    add = parser.add_argument_group("comparison of precisions").add_argument
    add(
        "--compare",
        action="store_true",
        help="train in bf16, fp8 delayed and fp8 current; plot all; the exit status is 1 if fp8 "
        "ends more than 1%% above bf16, and outside the spread of its seeds",
    )
    add("--seeds", type=int, default=1, metavar="N", help="runs of each, from --seed on (1)")
    return parser


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the options about the results of a run."""
    add = parser.add_argument_group("what comes out").add_argument
    add("--validate-every", type=int, metavar="N", help="steps (a tenth of --steps)")
    add("--sample", type=int, default=300, metavar="N", help="bytes to generate at the end (300)")
    add("--prompt", default="\ndef ", help="what the generated text begins with ('\\ndef ')")
    add("--plot", type=Path, default=Path("train_gpt.png"), metavar="PNG", help="(train_gpt.png)")
    add("--inspect", type=Path, metavar="YAML", help="look inside with the precision debugger")
    add(
        "--inspect-log", type=Path, default=Path("inspect_log"), metavar="DIR", help="(inspect_log)"
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="save here at validations, at the end and on Ctrl-C (on Ctrl-C alone: train_gpt.pt)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from --checkpoint, exactly as if never stopped, with the settings of that run",
    )
    add("--stop-after", type=int, metavar="N", help="end after step N; --resume continues")


def add_layouts(parser: argparse.ArgumentParser) -> None:
    """Add the options about the division of work over ranks."""
    ranks = parser.add_argument_group("on many ranks, started by torchrun; they share a batch")
    add = ranks.add_argument
    add("--tp", type=int, default=1, metavar="N", help="so many share every layer (1)")
    add("--sp", action="store_true", help="those of --tp share the tokens between layers, too")
    add("--cp", type=int, default=1, metavar="N", help="so many share every window (1)")
    add = ranks.add_mutually_exclusive_group().add_argument
    add("--ddp", action="store_true", help="each has a copy of the model")
    add("--fsdp", action="store_true", help="parameters are cut among them, layer by layer")


def settings_of(options: argparse.Namespace) -> Settings:
    """The run that the options describe."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = dict(SIZES[options.size or ("125m" if device == "cuda" else "tiny")])
    size.update({name: value for name in size if (value := getattr(options, name)) is not None})
    return Settings(
        data=options.data,
        device=device,
        model=options.model,
        precision=options.precision,
        recipe=options.recipe,
        fp8_weights=options.fp8_weights,
        dropout=options.dropout,
        seed=options.seed,
        validate_every=options.validate_every
        if options.validate_every is not None
        else max(1, size["steps"] // 10),
        **size,
    )


def layout_of(options: argparse.Namespace) -> Layout:
    """The layout that the options describe."""
    replicas = "ddp" if options.ddp else "fsdp" if options.fsdp else ""
    return Layout(replicas, options.tp, options.cp, options.sp)


def check_options(options: argparse.Namespace) -> None:
    """Raise UsageError for options that are wrong or cannot be combined."""
    if options.resume and not options.checkpoint:
        raise UsageError("--resume needs --checkpoint PATH to say where from")
    if options.stop_after is not None and (options.stop_after < 1 or not options.checkpoint):
        raise UsageError("--stop-after needs a step above 0, and --checkpoint PATH to go on from")
    if options.seeds < 1:
        raise UsageError(f"--seeds must be above 0, got {options.seeds}")
    if options.sample < 0 or (options.sample and not options.prompt):
        raise UsageError("--sample must not be negative, and --prompt not empty")
    for flag, path in (("checkpoint", options.checkpoint), ("plot", options.plot)):
        if path and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}: there is no folder {path.parent}")
        if path and path.is_dir():
            raise UsageError(f"--{flag} {path}: expected a file, got a folder")
    if options.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--plot {options.plot}: expected a name that ends in .png, .pdf or .svg")
    if options.inspect and options.compare:
        raise UsageError("--inspect does not go with --compare")
    if options.inspect and not options.inspect.is_file():
        raise UsageError(f"--inspect {options.inspect}: there is no such file")
    if options.compare and (options.checkpoint or options.model == "torch"):
        raise UsageError("--compare goes with neither --checkpoint nor --model torch")


def train(training: Training, options: argparse.Namespace, bigram: float) -> report.Outcome:
    """Run to the end (or to --stop-after), with progress, validation and checkpoints."""
    settings, start, began = training.settings, training.done, time.monotonic()
    te.gemm_report(reset=True)
    end = min(settings.steps, options.stop_after or settings.steps)
    with report.Progress(training) as progress, training.watching_interrupts():
        while training.done < end and not training.interrupted:
            validation = (training.done // settings.validate_every + 1) * settings.validate_every
            pace = training.advance(min(training.done + STRETCH, validation, end))
            if not math.isfinite(pace.loss):
                raise UsageError(f"the loss is {pace.loss} at step {training.done}; lower --lr")
            progress.update(training.done, pace)
            if training.done in (validation, settings.steps):
                loss = training.validate()
                progress.say(
                    f"{settings.label}: step {training.done}, validation loss {loss:.4f} "
                    f"(bigram {bigram:.4f})"
                )
                if options.checkpoint:
                    training.save(options.checkpoint)
    if training.interrupted and not options.checkpoint and not options.compare:
        options.checkpoint = INTERRUPTED
    if options.checkpoint and training.done > start:
        training.save(options.checkpoint)
    gemms = te.gemm_report()
    return report.Outcome(
        settings.label,
        training.losses[: training.done].tolist(),
        training.validation,
        time.monotonic() - began,
        {kind: gemms.total(kind) for kind in report.KINDS},
    )


def introduce(training: Training, text: Text) -> None:
    """Print the size of text and model, and the steps that are about to run."""
    settings = training.settings
    print(
        f"{text.name}: {len(text.train):,} bytes to train on, {len(text.validation):,} held out\n"
        f"{training.parameters:,} parameters on {settings.device}{training.ranks}, "
        f"steps {training.done} to {settings.steps} of {settings.batch} x {settings.seq} bytes",
        flush=True,
    )


def single(settings: Settings, text: Text, options: argparse.Namespace, ranks: Ranks) -> int:
    """Train once; plot the loss and show what the model writes."""
    training = Training(settings, text, ranks)
    if options.resume:
        training.load(options.checkpoint)
        if options.stop_after is not None and options.stop_after <= training.done:
            raise UsageError(
                f"--stop-after {options.stop_after}: {options.checkpoint} has step {training.done}"
            )
    introduce(training, text)
    bigram = bigram_loss(text.train, torch.cat(training.batches.validation))
    with inspection(options.inspect, options.inspect_log, training.done):
        outcome = train(training, options, bigram)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in outcome.gemms.items())
    print(f"GEMMs: {counts}; {outcome.seconds:.0f} s")
    if training.done < settings.steps:
        if ranks.number == 0:
            print(f"stopped after step {training.done}, saved {options.checkpoint}; go on with")
            print(f"  {command_to_go_on(options, options.words)}")
        return INTERRUPT_STATUS if training.interrupted else 0
    if ranks.number == 0:
        print(report.plot([outcome], bigram, options.plot))
    if options.sample:
        print("--- sample")
        print(report.readable(training.sample(options.prompt.encode(), options.sample)))
        print("---")
    print(f"validation loss {report.in_bits(outcome.final)}")
    print(f"bigram entropy  {report.in_bits(bigram)}")
    return 0


def compare(settings: Settings, text: Text, options: argparse.Namespace, ranks: Ranks) -> int:
    """Train in each precision from the same seeds; print whether FP8 is as good as bf16."""
    outcomes: list[report.Outcome] = []
    for seed in range(settings.seed, settings.seed + options.seeds):
        for kind in COMPARED:
            one = replace(settings, seed=seed, **{"precision": "fp8", **kind})
            training = Training(one, text, ranks)
            if not outcomes:
                introduce(training, text)
                bigram = bigram_loss(text.train, torch.cat(training.batches.validation))
            outcomes.append(train(training, options, bigram))
            if training.interrupted:
                print("interrupted; a comparison cannot be resumed")
                return INTERRUPT_STATUS
    table, kept_up = report.comparison(outcomes, bigram)
    if ranks.number == 0:
        print(report.plot(outcomes, bigram, options.plot))
    print(table)
    return 0 if kept_up else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; `arguments` None takes those of the command line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.words, said = arguments, named_options(parser, arguments)
    try:
        check_options(options)
        settings = settings_of(options)
        if options.resume:
            before = Settings(**read_checkpoint(options.checkpoint)["settings"])
            settings = as_before(settings, said, before)
        for note in notes(options, said, settings):
            print(f"note: {note}", file=sys.stderr)
        text = load_text(settings.data)
        with joined(layout_of(options), settings.device) as ranks:
            return (compare if options.compare else single)(settings, text, options, ranks)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
