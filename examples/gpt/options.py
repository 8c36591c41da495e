"""Options of the command line: which were given, which have no effect, and how to resume a run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

from gpt.settings import SIZES, Settings

Options = argparse.Namespace
BY_SIZE = next(iter(SIZES.values())).keys()  # settings that --size decides


def named_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> set[str]:
    """The options that the arguments contain, even if their value is the default."""
    nothing = object()
    start = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([])), nothing))
    said = vars(parser.parse_args(arguments, start))
    return {name for name, value in said.items() if value is not nothing}


def as_before(asked: Settings, said: set[str], before: Settings) -> Settings:
    """The settings of an earlier run, except for options that were given now."""
    names = said | set(BY_SIZE if "size" in said else ())
    return replace(
        before, **{f.name: getattr(asked, f.name) for f in fields(Settings) if f.name in names}
    )


# Options that have no effect if a condition holds, the condition, and the condition in words.
_IDLE: tuple[tuple[tuple[str, ...], Callable[[Options, Settings], bool], str], ...] = (
    (
        ("precision", "recipe", "fp8_weights", "sample", "prompt", "inspect_log", "stop_after"),
        lambda options, _: options.compare,
        "with --compare",
    ),
    (("recipe",), lambda _, settings: settings.precision != "fp8", "without --precision fp8"),
    (("seeds",), lambda options, _: not options.compare, "without --compare"),
    (("inspect_log",), lambda options, _: not options.inspect, "without --inspect"),
    (("prompt",), lambda options, _: not options.sample, "with --sample 0"),
)


def notes(options: Options, said: set[str], settings: Settings) -> Iterator[str]:
    """Hints to print before a run: options without effect, and slow choices."""
    for names, holds, when in _IDLE:
        for name in names:
            if name in said and holds(options, settings):
                yield f"--{name.replace('_', '-')} does nothing {when}"
    if settings.device == "cpu" and settings.precision == "bf16":
        yield "bf16 is slow on most CPUs, slower than fp32; --precision fp32 or fp8 trains faster"


def command_to_go_on(options: Options, arguments: Sequence[str] | None) -> str:
    """The command line that resumes from the checkpoint, which holds the settings."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    others: list[str] = []
    while words:
        word = words.pop(0)
        name, has_value, _ = word.partition("=")
        if name in ("--checkpoint", "--stop-after"):
            del words[: not has_value]
        elif name != "--resume":
            others.append(word)
    ranks = os.environ.get("WORLD_SIZE")
    start = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    path = str(options.checkpoint)
    return shlex.join([*start, sys.argv[0], *others, "--checkpoint", path, "--resume"])
