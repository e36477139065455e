"""Finds the program in the user's command that starts the ranks (torchrun itself, or a wrapper around torchrun) → `Program`.

The warm process (which forks ranks) replaces torchrun only if the agent knows everything that torchrun sets for its ranks. The agent knows
this only of torch's own entry point, run by an interpreter that is a binary. A site's wrapper may set anything, so the agent runs the
wrapper at each start.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...resilience.errors import MachineError, UsageError

RUN, LAUNCH = "torch.distributed.run", "torch.distributed.launch"
_LONGEST = 4096
"""The most bytes of a script that are read. An entry point has about 300."""
_SURPRISING = "{} is not torch's own torchrun, and may set what ranks need"
_NAMES = {"sys", "re", "main", "__name__"}
_ATTRIBUTES = {"argv", "exit", "sub", "endswith", "removesuffix"}
"""All names and attributes that occur in entry points written by pip, uv, conda and setuptools."""


@dataclass(frozen=True, kw_only=True)
class Program:
    words: tuple[str, ...]
    """The command that starts the launcher."""
    python: str
    """The interpreter that runs the launcher, and later the ranks."""
    interpreter: tuple[str, ...] = ()
    """The command that starts this interpreter as the launcher does, options included. Empty: only a wrapper knows it."""
    module: str = RUN
    surprising: str = ""
    """Why the ranks' environment may differ from that of a directly started Python; empty: it does not."""


def program(command: Sequence[str]) -> tuple[Program, list[str]]:
    """Return the program, and the rest of the command. Raises UsageError if the command is not torchrun, MachineError if torchrun is not
    installed."""
    name = os.path.basename(command[0])
    if name.startswith("python") and (found := _python(command)):
        return found
    if name == "torchrun":
        return _torchrun(command[0]), list(command[1:])
    cure = _in_front(command) or "the command has to be torchrun … or python -m torch.distributed.run …"
    raise UsageError(f"{command[0]} is not torchrun: mt-resilient run starts the ranks through torchrun, so {cure}")


def _in_front(command: Sequence[str]) -> str:
    """Return the advice where to put this program, if another program of the command starts torchrun; empty: no word is torchrun."""
    for at, word in enumerate(command[1:], 1):
        name = os.path.basename(word)
        if name == "torchrun" or (name.startswith("python") and _python(command[at:])):
            return f"put mt-resilient right in front of torchrun: {shlex.join(command[:at])} mt-resilient run -- {shlex.quote(word)} …"
    return ""


_INSTEAD = {"accelerate", "deepspeed", "lightning", "fabric", "mpirun", "horovodrun"}
"""Launchers that start ranks without torchrun."""


def is_script(command: Sequence[str]) -> bool:
    """Return whether the command is not torchrun itself, but may start it. Raises UsageError for another launcher, MachineError for a
    command that does not exist."""
    name = os.path.basename(command[0]) if command else "torchrun"
    if name == "torchrun" or (name.startswith("python") and _python(command)):
        return False
    module = _options_of_python(command)[1] or "" if name.startswith("python") else ""
    other = next((each for each in _INSTEAD if each in (name, module.partition(".")[0])), "")
    if other and (cure := _in_front(command)):
        raise UsageError(
            f"{other} may start torchrun where no agent can take its place; nothing was started. Instead, {cure}"
        )
    if other:
        raise UsageError(
            f"{other} starts the ranks by itself, so no agent could watch them; nothing was started. Start the same script with torchrun, "
            "which sets the same variables: mt-resilient run -- torchrun --nproc-per-node N SCRIPT …"
        )
    if not shutil.which(command[0]):
        if os.path.isfile(command[0]) and not os.access(command[0], os.X_OK):
            raise UsageError(f"{command[0]} is not executable; nothing was started. Put bash in front of it")
        raise MachineError(f"{command[0]} was not found; nothing was started")
    return True


def _python(command: Sequence[str]) -> tuple[Program, list[str]] | None:
    """Parse `python [options] -m torch.distributed.run …` or `python [options] …/torchrun …`, in any form that Python accepts. Return None
    for any other command."""
    options, module, position = _options_of_python(command)
    python = shutil.which(command[0]) or command[0]
    interpreter = (command[0], *options)
    surprising = "" if _is_binary(python) else f"{python} is a script, and may set what ranks need"
    rest = list(command[position:])
    if module is None and rest and os.path.basename(rest[0]) == "torchrun" and os.path.isfile(rest[0]):
        words, module, rest = (*interpreter, rest[0]), RUN, rest[1:]
        if not _is_entry_point(_source(words[-1])):
            surprising = _SURPRISING.format(words[-1])
    elif module in (RUN, LAUNCH):
        words = (*interpreter, "-m", module)
    else:
        return None
    return Program(words=words, python=python, interpreter=interpreter, module=module, surprising=surprising), rest


def _options_of_python(command: Sequence[str]) -> tuple[list[str], str | None, int]:
    """Return Python's options, the module that it runs (None: a script), and the index of the script, or of the module's first argument."""
    options: list[str] = []
    position = 1
    while position < len(command) and command[position].startswith("-") and len(command[position]) > 1:
        word = command[position]
        position += 1
        short = not word.startswith("--")
        at = next((n for n, letter in enumerate(word) if short and letter in "mcWX"), 0)  # its value follows
        taken = [word]
        if (at and not word[at + 1 :]) or word == "--check-hash-based-pycs":
            taken += command[position : position + 1]
            position += 1
        if at and word[at] in "mc":
            options += [word[:at]] if at > 1 else []
            return options, word[at + 1 :] or taken[-1] if word[at] == "m" else "", position
        options += taken
    return options, None, position


def _torchrun(name: str) -> Program:
    beside = Path(sys.executable).with_name("torchrun")  # this environment's own torchrun, if PATH has none
    path = shutil.which(name) or (str(beside) if name == "torchrun" and beside.exists() else None)
    if not path:
        raise MachineError(f"{name} was not found on PATH; install torch in this environment, or name the whole path")
    source = _source(path)
    interpreter = _interpreter(source)
    python = interpreter[0] if interpreter else sys.executable
    if interpreter and _is_binary(python) and _is_entry_point(source):
        return Program(words=(path,), python=python, interpreter=interpreter)
    return Program(words=(path,), python=python, surprising=_SURPRISING.format(path))


def _source(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_LONGEST).decode(errors="replace")


def _interpreter(source: str) -> tuple[str, ...]:
    """Return the Python that runs this script, and its options; empty: the script's first line names no Python."""
    first, _, rest = source.partition("\n")
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if first == "#!/bin/sh" and rest.startswith("'''exec' "):  # for a path with spaces, or too long for a first line
        words = shlex.split(rest.partition("\n")[0].removeprefix("'''exec' "))[:-2]
    if words and os.path.basename(words[0]) == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
        words = [shutil.which(words[0]) or words[0], *words[1:]] if words else []
    return tuple(words) if words and "python" in os.path.basename(words[0]) else ()


def _is_binary(program: str) -> bool:
    try:
        with open(program, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _is_entry_point(source: str) -> bool:
    """Return whether a script calls `main` of torch.distributed.run, and does nothing else that could affect its ranks."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (ValueError, SyntaxError):
        return False
    brought = {
        (node.module if isinstance(node, ast.ImportFrom) else None, alias.name, alias.asname)
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    torch = (RUN, "main", None)
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    asked = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    plain = {torch, (None, "sys", None), (None, "re", None)}
    return torch in brought and brought <= plain and used <= _NAMES and asked <= _ATTRIBUTES
