"""The command line: `python -m nvdlfw_inspect COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from nvdlfw_inspect.report.extras import MissingExtraError
from nvdlfw_inspect.report.records import LogError

# A command is a module with EXAMPLES, add_arguments(parser) and run(arguments) -> exit code.
# Only the chosen one is imported: reading logs works where the extension module is not built.
COMMANDS = (
    (
        "check",
        "nvdlfw_inspect.check",
        "validate a configuration and print what it would do, without training",
    ),
    (
        "summary",
        "nvdlfw_inspect.report.summary",
        "show the worst layers of a run in the terminal",
    ),
    (
        "report",
        "nvdlfw_inspect.report.page",
        "write a page of charts, verdicts and advice about a run",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, 2 for input that it cannot use."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parsed = _parser(words).parse_args(words)
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` closed the pipe; the flush at exit must not fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (LogError, MissingExtraError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return code


def _parser(words: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvdlfw_inspect", description="What a run of the precision debugger shows."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module_name, what in COMMANDS:
        command = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in words:
            module = importlib.import_module(module_name)
            command.epilog = module.EXAMPLES
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
