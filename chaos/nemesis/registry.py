"""The register of faults. A fault is one function; its docstring is what `mt-resilient chaos --list` says.

The function does it at once, and returns what it did. A fault that lasts returns what ends it, too. It raises NotThere if there is nothing
to strike.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..judgement.plan import Injection, Kind
from ..live.job import Job


@dataclass(frozen=True, kw_only=True)
class Done:
    did: str
    end: Callable[[], object] | None = None
    needs_disk: bool = False
    """Whether the agent's memory is lost, so that the job starts from disk."""
    damaged: str = ""
    """Name of the snapshot on disk that was damaged."""


Fault = Callable[[Job, Injection], Done]


@dataclass(frozen=True)
class Entry:
    kind: Kind
    strike: Fault
    root: bool
    """Whether it takes root."""


FAULTS: dict[str, Entry] = {}


def fault(
    *, of_a_rank: bool = False, lasts_s: float = 0.0, seeded: bool = True, root: bool = False
) -> Callable[[Fault], Fault]:
    """Register the function as a fault."""

    def register(function: Fault) -> Fault:
        name = function.__name__
        says = " ".join((function.__doc__ or "").split())
        family = function.__module__.rpartition(".")[2]
        kind = Kind(name=name, says=says, family=family, of_a_rank=of_a_rank, lasts_s=lasts_s, seeded=seeded)
        FAULTS[name] = Entry(kind, function, root)
        return function

    return register


def kinds() -> dict[str, Kind]:
    """Return all faults by name. Without root, a seed draws none that takes it."""
    may = os.geteuid() == 0
    return {
        name: entry.kind if may else replace(entry.kind, seeded=entry.kind.seeded and not entry.root)
        for name, entry in FAULTS.items()
    }
