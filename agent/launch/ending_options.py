"""Reads torchrun's options that say how it ends its ranks, because the agent must end them in the same way: `--shutdown-timeout` and
`--signals-to-handle`."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from ...resilience.model.generation import PASSED_ON
from .script_options import value

_SIGNALS = {*PASSED_ON, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
"""The signals of `--signals-to-handle` that also end an agent. Others, such as SIGCHLD, mean something else to it."""


def shutdown_s(options: Sequence[str], environ: Mapping[str, str]) -> float:
    """Return the seconds that the user gives ranks to exit after a signal; 0: the user names none, and torchrun waits 30 s. options:
    `Launch.options`."""
    told = _told("shutdown_timeout", options, environ) or environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return float(told) if told.isdecimal() else 0.0


def passed_on(options: Sequence[str], environ: Mapping[str, str]) -> set[signal.Signals]:
    """Return the signals that torchrun forwards to its ranks. options: `Launch.options`."""
    told = _told("signals_to_handle", options, environ)
    names = {name.strip() for name in told.split(",")}
    return {number for number in _SIGNALS if number.name in names} if told else {*PASSED_ON}


def _told(name: str, options: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the value of an option, from the command line or its PET_… variable; empty: the option is not given."""
    spellings = f"--{name}", f"--{name.replace('_', '-')}"
    return next(filter(None, (value(options, each) for each in spellings)), environ.get(f"PET_{name.upper()}", ""))
