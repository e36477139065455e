"""What a campaign has seen: of the runs without faults, of the run with faults, and of each fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .plan import Injection, Kind


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the user's command, to its end."""

    exit_code: int
    lines: tuple[str, ...] = ()
    """What the command printed on standard output."""
    seconds: float = 0.0
    digest: str = ""
    """SHA-256 of the newest snapshot on disk; empty: there is none, as without a Session or a loop that is known."""
    step: int = -1
    """Step of that snapshot."""
    start_s: float = 0.0
    """Seconds from the start to the first step that all ranks had finished. `pause_s`: the longest time between two steps after it. 0: not
    measured, as for a run under torchrun alone or with faults."""
    pause_s: float = 0.0
    left: tuple[str, ...] = ()
    """What the run left behind: processes, files in shared memory, temporary files."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of the job at one moment."""

    at_s: float
    """Seconds since the job's first start; `generation` and `steps` are those of the ranks that run."""
    generation: int = 0
    steps: tuple[int, ...] = ()
    """Finished steps of each rank; -1: none yet in this generation."""
    memory_step: int = -1
    """The newest step that memory holds; `copied_step`: other nodes' memory; `disk_step`: the disk. -1: none, or not known."""
    copied_step: int = -1
    disk_step: int = -1
    overlap: str = ""
    """A process of an earlier generation that is alive while a later one makes steps; empty: there is none."""

    @property
    def step(self) -> int:
        """The newest step that all ranks have finished."""
        return min(self.steps, default=-1)


@dataclass(frozen=True, kw_only=True)
class Struck:
    """One fault, as it was injected."""

    injection: Injection
    kind: Kind
    at_s: float
    did: str = ""
    """What was done, in words; empty: the fault could not be injected."""
    why_not: str = ""
    """Why the fault could not be injected, or not be ended; empty: it could."""
    seen: Seen
    """What was seen right before."""
    phase: str = ""
    """The phase of a recovery in which the fault struck."""
    ended_s: float = 0.0
    """When a fault that lasts was over."""
    needs_disk: bool = False
    """Whether the fault took all memory that held a part of the state, so that the job had to start from disk."""
    needs_copy: bool = False
    """Whether the fault took the memory of one node of several, so that this node's part of the state had to come from another node's
    memory, or from disk."""
    damaged: str = ""
    """Name of the snapshot on disk that the fault damaged."""


@dataclass(frozen=True, kw_only=True)
class History:
    plain: Run
    """Under torchrun alone; `clean`: under this program, with no fault."""
    clean: Run
    faults: Run
    struck: tuple[Struck, ...]
    seen: tuple[Seen, ...] = ()
    journal: tuple[Mapping[str, Any], ...] = ()
    unexpected: tuple[str, ...] = ()
    """Ends of the agent that no fault explains, and what did not come to its end in time."""
    damaged: tuple[str, ...] = ()
    """Snapshots that were found damaged at the end, and that no fault had damaged."""
    spares: int = 0
    """Number of nodes that stand by."""
    again: Run | None = None
    """A second run with no fault, whose steps are held up as in the run with faults. It is made if state or lines differ."""
    delay_s: float = 0.0
    """For how long each step was held up in the run with faults."""

    def told(self) -> list[dict[str, Any]]:
        """Return what was done and seen, for a file."""
        did = [
            {"did": each.did or each.why_not, "fault": str(each.injection), "at_s": each.at_s} for each in self.struck
        ]
        seen = [{"at_s": each.at_s, "generation": each.generation, "steps": each.steps} for each in self.seen]
        return [*did, *({"seen": each} for each in seen)]
