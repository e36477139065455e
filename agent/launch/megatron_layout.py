"""Tells which of the allowed numbers of nodes cannot hold the layout that the script's arguments ask for: tensor, pipeline, context and
expert parallel ranks stay as they are, replicas are added or dropped, and the global batch stays the same. On such a number, Megatron would
stop at each start with an error. Pure, except that the script's text is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...resilience.text import formatting
from .torchrun import Launch

_MOST_BYTES = 1 << 20
_OTHER_BATCHES = ("--rampup-batch-size", "--decrease-batch-size-if-needed", "--step-batch-size-schedule")
"""Options with which the global batch is not the same in all steps."""


def fitting(launch: Launch, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], list[str]]:
    """Return the numbers of nodes that can hold the layout, and a sentence about each of the others. All numbers are returned if the script
    does not name Megatron, or if none would be left."""
    if len(numbers) < 2 or launch.form or "megatron" not in _text(Path(launch.script[0])):
        return numbers, []
    unfit = {number: why for number in numbers if (why := misfit(launch.script, number * launch.ranks))}
    if len(unfit) == len(numbers):
        return numbers, []
    return tuple(number for number in numbers if number not in unfit), [
        f"{formatting.count(number, 'node')} cannot hold the script's layout, and the job leaves this number out: {why}"
        for number, why in unfit.items()
    ]


def misfit(words: Sequence[str], ranks: int) -> str:
    """Return the reason why so many ranks cannot hold Megatron's layout; empty: they can, or the arguments do not say."""
    tp, pp, cp = (
        _number(words, f"--{name}", 1)
        for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    )
    if ranks % (tp * pp * cp):
        return f"{ranks} ranks are no multiple of a replica's {tp * pp * cp} (TP {tp}, PP {pp}, CP {cp})"
    ep = _number(words, "--expert-model-parallel-size", 1)
    etp = _number(words, "--expert-tensor-parallel-size", tp)
    if ep > 1 and ranks % (ep * etp * pp):
        return (
            f"{ranks} ranks are no multiple of the {ep * etp * pp} that hold all experts (EP {ep}, ETP {etp}, PP {pp})"
        )
    whole, micro = _number(words, "--global-batch-size", 0), _number(words, "--micro-batch-size", 0)
    replicas = ranks // (tp * pp * cp)
    fixed = not any(word.partition("=")[0] in _OTHER_BATCHES for word in words)
    if whole and micro and fixed and whole % (micro * replicas):
        return f"the global batch of {whole} does not divide by {replicas} replicas with micro-batches of {micro}"
    return ""


def _number(words: Sequence[str], option: str, default: int) -> int:
    """Return the last value of an option; the default if there is none, or it is no positive number."""
    given = [value for name, value in zip(words, [*words[1:], ""], strict=True) if name == option]
    given += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return int(given[-1]) if given and given[-1].isdecimal() and int(given[-1]) else default


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
