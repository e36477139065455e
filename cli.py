"""The command line: parses the arguments, runs a command, returns an exit code, and prints each error as one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import commands, run_command
from .options import parser
from .resilience.errors import MachineError, ResilientError, UsageError
from .resilience.ipc.file_descriptors import fill_standard
from .resilience.text.formatting import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: the command's own, or that of its error (see resilience/errors.py)."""
    fill_standard()
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # paths may contain any bytes, and a terminal may have any encoding
            stream.reconfigure(errors="backslashreplace")
    if words[:1] != ["run"]:
        return _exit_code(words)
    from .agent.output.async_output import unhurried

    with unhurried():
        return _exit_code(words)


def _exit_code(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except ResilientError as error:
        print(f"mt-resilient: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `mt-resilient explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None or words[:1] in (["run"], ["chaos"]):
            raise
        print(f"mt-resilient: {printable(str(error.filename))}: {error.strerror}", file=sys.stderr)
        return MachineError.exit_code
    except KeyboardInterrupt:
        return 130


def _dispatch(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    launcher = next(
        (i for i, word in enumerate(words[:cut]) if Path(word).name.startswith(("torchrun", "python"))), None
    )
    if words[:1] in (["run"], ["chaos"]) and launcher is not None and cut == len(words):
        raise UsageError(f"the command goes after two dashes: mt-resilient {words[0]} -- {' '.join(words[launcher:])}")
    options = parser().parse_args(words[:cut])
    if options.version:
        from . import __version__

        print(f"mt-resilient {__version__}")
        return 0
    if options.command is None:
        parser().print_help()
        return 0
    if options.command == "run":
        if options.wrapped:
            raise UsageError(f"the command goes after two dashes: mt-resilient run -- {' '.join(options.wrapped)} …")
        return run_command.run(options, words[cut + 1 :], words[1:cut])
    if options.command == "chaos":
        return commands.chaos(options, words[cut + 1 :])
    return commands.COMMANDS.get(options.command, commands.order)(options)


if __name__ == "__main__":
    raise SystemExit(main())
