"""Hands each torchrun that a script starts to an agent: `mt-resilient run -- bash run.sh`.

    run ──exec──▶ the script, with variables ──▶ torchrun, or python -m torch.distributed.run ──exec──▶ mt-resilient run -- torchrun …
                                             └─▶ ssh HOST COMMAND ──exec──▶ ssh, which sets the same variables at the far end

`bin/torchrun` and `bin/ssh` come first on PATH. A Python that runs torchrun's file or module comes here through our `sitecustomize`. Each
step replaces its process. So pids, pipes, traps, exit codes and `nohup` are as without this program. An agent gets the environment that
torchrun would have had.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_HERE = Path(os.path.abspath(__file__))
BIN = str(_HERE.with_name("bin"))
SITE = str(_HERE.parents[2] / "training" / "site")
"""The directory of the hook (the module that each rank loads), which comes first on the ranks' PYTHONPATH."""
WRAPS, PYTHON = "MT_RESILIENT_WRAPS", "MT_RESILIENT_PYTHON"
"""WRAPS: the agent's own options, as JSON in hexadecimal digits: scripts re-export variables in quotes. PYTHON: the agent's interpreter."""
_ABSENT = "MT_RESILIENT_NO_PYTHONPATH"
"""This environment variable is not empty if the user's environment had no PYTHONPATH."""
_IF_ANY = "if any"
"""The value of _ABSENT if the script adds its colon only behind a PYTHONPATH that is not empty: `/repo${PYTHONPATH:+:$PYTHONPATH}`. Without
this form, `/repo:` means what the script's own `/repo:$PYTHONPATH` means: the working directory is searched, too."""
_WITH_A_VALUE = "BbcDEeFIiJLlmOoPpQRSWw"
"""ssh's options that have a value (OpenSSH 9)."""
_WITHOUT_A_COMMAND = set("sNWO")
"""Options with which ssh runs no command."""
_FAR = (
    f'{_ABSENT}=1; [ -z "$PYTHONPATH" ] || {_ABSENT}=; '
    f'export {_ABSENT} PATH={shlex.quote(BIN)}:"$PATH" PYTHONPATH={shlex.quote(SITE)}"${{PYTHONPATH:+:$PYTHONPATH}}"; '
)
"""What the shell at the far end of an ssh runs before the command. The user's command then runs in the same shell, because it may need
functions from the shell's start files."""
_STARTER = re.compile(r"(?:ba|da|k|z|c|tc)?sh|torchrun|python[\d.]*|.*\.sh|\$.*|.*/.*")
"""The programs that may start a torchrun: these, and those that are named by a path or a variable."""
_NAMED = re.compile(r"(?:.*/)?torchrun|torch\.distributed\.(?:run|launch)|.*\btorchrun\s.*", re.DOTALL)
"""The words that name torchrun. They count behind every program except these, which only handle it as a file or a text:"""
_LEFT_ALONE = re.compile(
    r"(?:.*/)?(?:git(?:-.*)?|rsync|scp|sftp-server|pkill|pgrep|killall|kill|cp|mv|rm|mkdir|touch|chmod|echo|printf|cat|ls|which|grep|tail)"
)
_IN_FRONT = re.compile(
    r"nohup|setsid|env|exec|time|timeout|nice|ionice|taskset|numactl|stdbuf|sudo|command|source|eval|if|then|else|while|until|do|[.!{]"
)
"""The words that may stand in front of a program, with options and variables."""


def environment(words: Sequence[str], environ: Mapping[str, str], command: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a script whose torchruns are handed to agents. words: the agents' own options. command: starts the script;
    of its files, the first MiB is read."""
    known = environ.get("PYTHONPATH", "")
    return {
        **environ,
        WRAPS: json.dumps(list(words)).encode().hex(),
        PYTHON: sys.executable,
        _ABSENT: "" if known else _IF_ANY if any(map(_adds_if_any, command)) else "1",
        "PATH": f"{BIN}{os.pathsep}{environ.get('PATH', os.defpath)}",
        "PYTHONPATH": f"{SITE}{os.pathsep}{known}" if known else SITE,
    }


def _adds_if_any(word: str) -> bool:
    """Return whether a word of the command, or the file that it names, has `${PYTHONPATH:+`."""
    text = word.encode(errors="surrogateescape")
    if os.path.isfile(word):
        with suppress(OSError), open(word, "rb") as file:
            text = file.read(1 << 20)
    return re.search(rb"\$\{PYTHONPATH:?\+", text) is not None


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a program would have without `environment`."""
    found = {name: value for name, value in environ.items() if name not in (WRAPS, PYTHON, _ABSENT)}
    places = found.get("PATH", os.defpath).split(os.pathsep)
    found["PATH"] = os.pathsep.join(place for place in places if place != BIN)
    path = found.get("PYTHONPATH", "")
    if environ.get(_ABSENT) in (None, "", _IF_ANY):
        path = path.replace(f"{SITE}{os.pathsep}", "")
    if environ.get(_ABSENT) == _IF_ANY:
        path = path.replace(f"{os.pathsep}{SITE}", "")
    path = path.replace(SITE, "")
    return {**found, "PYTHONPATH": path} if path else {n: value for n, value in found.items() if n != "PYTHONPATH"}


def agent(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command of the agent that runs the torchrun `command`. Raises ValueError if the environment has no valid WRAPS."""
    words = json.loads(bytes.fromhex(environ.get(WRAPS, "")))
    return [environ[PYTHON], "-P", "-m", "mt_resilient", "run", *words, "--", *command]


def far(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of an ssh whose command runs with the same variables. Return them unchanged if there is no command, or if the
    command names no program that may start torchrun (git, rsync, sshfs)."""
    at, host, letters = 0, False, set[str]()
    while at < len(arguments):
        word = arguments[at]
        if word.startswith("-") and word != "-":
            letter = next((n for n, each in enumerate(word[1:], 1) if each in _WITH_A_VALUE), 0)
            letters.update(word[1 : letter + 1 if letter else None])
            at += 2 if letter == len(word) - 1 and letter else 1
        elif host:
            break
        else:
            host, at = True, at + 1
    if letters & _WITHOUT_A_COMMAND or not _may_start_torchrun(" ".join(arguments[at:])):
        return list(arguments)
    variables = " ".join(f"{name}={shlex.quote(environ.get(name, ''))}" for name in (WRAPS, PYTHON))
    return [*arguments[:at], f"export {variables}; {_FAR}{' '.join(arguments[at:])}"]


def _may_start_torchrun(command: str) -> bool:
    """Return whether `command`, in a shell's words, may start torchrun."""
    words = shlex.shlex(command.replace("\n", ";"), posix=True, punctuation_chars=";&|()")
    words.whitespace_split, words.commenters = True, ""
    first, passes, alone = True, True, False
    try:
        for word in words:
            if not word.strip(";&|()"):
                first, passes, alone = True, True, False
                continue
            alone = alone or (passes and bool(_LEFT_ALONE.fullmatch(word)))
            if not alone and ((passes and _STARTER.fullmatch(word)) or _NAMED.fullmatch(word)):
                return True
            passes = bool(_IN_FRONT.fullmatch(word)) or "=" in word if first else passes
            first = False
    except ValueError:  # an unclosed quote, such as an apostrophe in a comment
        return "torchrun" in command or "torch.distributed" in command
    return False


def replacement(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command that replaces `command`. The first word of the returned command is the program's path; empty: the program is not
    there."""
    if command[0] == "ssh":
        return [shutil.which("ssh", path=cleaned(environ)["PATH"]) or "", *far(command[1:], environ)]
    if command[-1] in ("-h", "--help"):
        return _real(command, environ)
    try:
        return agent(_real(command, environ, by_name=True), environ)
    except ValueError:
        print(f"mt-resilient: the script has changed {WRAPS}. This torchrun runs without mt-resilient", file=sys.stderr)
        return _real(command, environ)


def _real(command: Sequence[str], environ: Mapping[str, str], *, by_name: bool = False) -> list[str]:
    """Return `command` with the user's torchrun in place of ours. by_name: a torchrun without a path stays as it is."""
    real = shutil.which("torchrun", path=cleaned(environ)["PATH"]) or ""
    first = real if command[0] == "torchrun" and not by_name else command[0]
    return [real if word == f"{BIN}/torchrun" else word for word in (first, *command[1:])]  # python $(which torchrun) …


def uncoerced(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with LC_CTYPE as this process was given it: Python sets LC_CTYPE to C.UTF-8 in the C locale (PEP 538)."""
    kept = {name: value for name, value in environ.items() if name != "LC_CTYPE"}
    try:
        given = re.findall(rb"(?:^|\0)LC_CTYPE=([^\0]*)", Path("/proc/self/environ").read_bytes())
    except OSError:
        return dict(environ)
    return {**kept, "LC_CTYPE": os.fsdecode(given[0])} if given else kept


def become(words: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process with a command, as a shell starts it. Raises OSError."""
    environ = uncoerced(environ)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a command inherits that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        if b"\0" in Path(shutil.which(words[0]) or words[0]).read_bytes()[:80].partition(b"\n")[0]:
            raise  # a program of another machine
    shell = shutil.which("bash") or "/bin/sh"  # for a script without a first line that names its interpreter
    os.execve(shell, [shell, shutil.which(words[0]) or words[0], *words[1:]], environ)


def main() -> None:
    """Replace this process with the agent, or with ssh. The arguments are the command."""
    words = replacement(sys.argv[1:], os.environ)
    if not words[0]:
        print(f"{sys.argv[1]}: command not found", file=sys.stderr)
        sys.exit(127)
    # As under torchrun, these signals also end a job in a script's background, where the shell ignores them.
    if sys.argv[1] != "ssh":
        for number in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
    become(words, cleaned(os.environ))


if __name__ == "__main__":
    main()
