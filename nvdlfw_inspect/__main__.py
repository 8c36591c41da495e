"""The command line: `python -m nvdlfw_inspect COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from nvdlfw_inspect.report.extras import MissingExtraError
from nvdlfw_inspect.report.records import LogError

# A command is a module with HELP, EXAMPLES, add_arguments(parser) and run(arguments) -> exit code.
COMMANDS = (
    ("check", "nvdlfw_inspect.check"),
    ("summary", "nvdlfw_inspect.report.summary"),
    ("report", "nvdlfw_inspect.report.page"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, 2 for input that it cannot use."""
    parser = argparse.ArgumentParser(
        prog="python -m nvdlfw_inspect", description="What a run of the precision debugger shows."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module_name in COMMANDS:
        module = importlib.import_module(module_name)
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except (LogError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough; say nothing when the interpreter flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
