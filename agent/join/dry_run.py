"""What `run --dry-run` prints: what was understood of a launch, what will change, and what is not known. It starts and writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...resilience.model.node import Spec
from ...resilience.text import formatting
from ..launch.launcher_program import LAUNCH, RUN
from ..launch.megatron_layout import text_of
from ..launch.script_options import value
from ..launch.torchrun import Launch
from ..run_directory import RunDirectory
from .config_match import command_difference
from .registration import comparable
from .static_nodes import Static

Line = tuple[str, str]
_OF_MEGATRON = {
    "layout": (
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--expert-model-parallel-size",
        "--context-parallel-size",
    ),
    "batch sizes": ("--micro-batch-size", "--global-batch-size"),
    "save and load": ("--save", "--load", "--save-interval"),
    "length": ("--train-iters", "--train-samples"),
}
_LOOPS = {
    "megatron.bridge": "Megatron-Bridge's, which is watched, and rewound in place",
    "megatron.training": "Megatron-LM's, which is watched, and rewound in place",
    "mt_resilient": "the script's own, with a Session",
}
"""What a script mentions → its training loop."""
_ARRANGED = ("rdzv-", "node-rank", "master-", "max-restarts", "standalone")
_TORCHRUN = re.compile(rf"\btorchrun\b(?!['\"]?\s*$)|{re.escape(RUN)}\b|{re.escape(LAUNCH)}\b")
_MODULE = re.compile(rf"-\w*m\s*(?:{re.escape(RUN)}|{re.escape(LAUNCH)})\b")
_ACTIVATES = re.compile(
    r"\b(?:conda|mamba|micromamba|pyenv)\s+activate\b|(?:^|[\s;&(])(?:\.|source)\s+\S*\bactivate\b|\bmodule\s+(?:load|add|swap)\b"
)
_REPLACES = {
    name: re.compile(rf"\b{name}=(?!.*\${{?{name}\b)|\bunset\s[^;&|]*\b{name}\b") for name in ("PATH", "PYTHONPATH")
}
_ONE = re.compile(r"PYTHONPATH=\S*\s+\S")
"""Matches a line that sets the variable for one command only."""
_LOST = {
    "PATH": "replaces PATH; torchrun then has an agent only if PYTHONPATH keeps its value",
    "PYTHONPATH": "replaces PYTHONPATH; then python -m torch.distributed.run has no agent, and torchrun has one only while "
    "mt-resilient's own torchrun is the first on PATH. Write PYTHONPATH=…:$PYTHONPATH",
    "activate": "may put another torchrun first on PATH, which has an agent only if PYTHONPATH keeps its value",
}
"""What a line does to a variable → what becomes of torchrun."""
_SSH = re.compile(r"(?:^|[;&|(\s])ssh\s+(?=\S)")
_SCRIPT = re.compile(r"(?<![\w./-])[\w./-]+\.sh\b")  # the search begins once in each word: a line may have megabytes
_MOST_FILES = 16
_LONGEST = 100


def of_launch(
    launch: Launch, command: Sequence[str], nodes: str, static: Static | None, known: Mapping[str, str]
) -> Iterator[Line]:
    """Yield what is understood of a torchrun command. nodes: how many train. known: where else values come from,
    such as `etcd`."""
    yield "form", f"torchrun, run by {launch.python}"
    yield "script", " ".join(filter(None, [launch.form, launch.script[0]]))
    yield "loop", _loop(launch)
    yield "ranks", f"{launch.ranks or launch.counts} on each node"
    yield "nodes", nodes or "1"
    yield from filter(all, known.items())
    if static:
        what = "this node, which runs it" if static.serves else "the first node, which runs it"
        yield "etcd", f"{static.control.etcd} on {what} (from torchrun's --master-addr)"
    for name, options in _OF_MEGATRON.items():
        given = [f"{option[2:]} {found}" for option in options if (found := value(launch.script, option))]
        if given:
            yield name, ", ".join(given)
    ours = command[: len(command) - len(launch.script)]
    names = [word.partition("=")[0] for word in ours if word.lstrip("-").replace("_", "-").startswith(_ARRANGED)]
    if names:
        yield "changed", f"{formatting.listed(names)}: each start of the ranks has a rendezvous of its own"
    if launch.hooked:
        yield "changed", "PYTHONPATH begins with a folder of this program, by which it reaches the ranks"
        yield "changed", "PYTHONHASHSEED is set, so that sets have the same order after each recovery"
    if launch.ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        yield "changed", "OMP_NUM_THREADS is 1, as torchrun sets it"
    yield (
        "restarts",
        f"cold: {launch.warm_refused}" if launch.warm_refused else "warm, once the ranks have finished a step",
    )
    yield "not known", "whether the training repeats to the bit, and which modules the script imports later"


def state(run: RunDirectory, spec: Spec, *, changed: bool) -> str:
    """Return what `run` would do in this run directory. changed: the arguments may differ. Raises UsageError as `run` does."""
    if not run.root.exists():
        return "which is new"
    if run.agent():
        raise run.in_use
    known = tuple(run.arguments or spec.command)
    if known != spec.command:
        comparable(replace(spec, command=known), spec, run, several=False, other_command=changed)
        return f"which exists: its last run had other arguments: {command_difference(spec.command, known)}"
    return (
        f"which exists: {'the job is finished, and nothing starts' if run.finished.exists() else 'the job continues'}"
    )


def _loop(launch: Launch) -> str:
    if launch.form:
        return "not known: the script is no Python file. A loop that is known is found when the ranks import it"
    text = text_of(Path(launch.script[0]))
    found = next((loop for name, loop in _LOOPS.items() if name in text), "")
    return found or "not known: the script names none. A loop that is known is found when the ranks import it"


def of_script(command: Sequence[str]) -> Iterator[Line]:
    """Yield what is found in the text of a script and of the scripts that it names. Values of variables are not known."""
    yield (
        "form",
        f"{command[0]} is not torchrun: it runs unchanged, and each torchrun that it starts gets an agent, unless a warning says otherwise",
    )
    said = False
    if any(os.path.basename(word) == "torchrun" for word in command[1:]):
        said = True
        yield "torchrun", f"in the command itself, which {command[0]} starts"
    for place, line in _lines_of(command):
        for name, what in _in_line(line):
            said = said or name == "torchrun"
            yield name, f"{place}: {what}"
    if not said:
        yield "not known", "which torchrun the script starts: its text names none"
    else:
        yield "not known", "the values of the script's variables: they are known when the script runs"


def unwatched(command: Sequence[str]) -> str:
    """Return the line of a script behind which its torchruns may have no agent, and why; empty: its text has no such line."""
    lines = [(place, line) for place, line in _lines_of(command) if not _ONE.match(line) or _TORCHRUN.search(line)]
    another = any(_ACTIVATES.search(line) or re.search(r"\bPATH=", line) for _, line in lines)
    if another or any(_MODULE.search(line) for _, line in lines):
        for place, line in lines:
            if _REPLACES["PYTHONPATH"].search(line):
                return f"{place}: {_shown(line)} ({_LOST['PYTHONPATH']})"
    return ""


def _lines_of(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the files that a command names, and of the scripts that these name, each with its place."""
    todo, seen = [Path(word) for word in command if os.path.isfile(word)], list[Path]()
    while todo and len(seen) < _MOST_FILES:
        file = todo.pop(0)
        if file in seen:
            continue
        seen.append(file)
        for number, line in _lines(file):
            yield f"{file}:{number}", line
            for word in _SCRIPT.findall(line):
                beside = word.lstrip("/")  # behind a variable, such as $WORK_HOME/run.sh or $(dirname "$0")/run.sh
                todo += [
                    path for path in (Path(word), file.parent / word, file.parent / beside) if os.path.isfile(path)
                ]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text_of(file).splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line.strip()


def _in_line(line: str) -> Iterator[Line]:
    shown = _shown(line)
    if "pkill" in line:
        yield "ends jobs", f"{shown} (finds the agent, too, if it looks for torchrun)"
    elif _TORCHRUN.search(line):
        yield "torchrun", shown
    if _SSH.search(line):
        yield "ssh", f"{shown} (a torchrun at the far end has an agent there)"
    for name, pattern in {**_REPLACES, "activate": _ACTIVATES}.items():
        if pattern.search(line):
            yield "warning", f"{shown} ({_LOST[name]})"


def _shown(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def printed(lines: Iterator[Line]) -> str:
    return "\n".join(f"{name + ':':15}{what}" for name, what in lines)
